"""A small training run under torchrun, and what its log says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POINTS = Path(__file__).resolve().parents[1] / "fault_points.py"
TIMEOUT_SECONDS = 20.0  # of a collective
EVERY = 2  # steps between checkpoints

MODEL = """
import torch
from torch import nn
from torch.nn import functional

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(24, 48), nn.Linear(48, 48), nn.Linear(48, 8)

    def forward(self, x, y):
        x = functional.dropout(torch.relu(self.middle(torch.relu(self.up(x)))), 0.1)
        return functional.mse_loss(self.down(x), y)

def make():
    torch.manual_seed(0)
    return Model(), (torch.randn(16, 24), torch.randn(16, 8)), {}
"""


@dataclass
class Job:
    """A folder with a model, a plan, a log and checkpoints, and the processes that use it."""

    folder: Path
    steps: int
    cluster: str = "2xcpu"
    name: str = "run"
    checkpoints: Path | None = None
    faults: list[dict[str, Any]] = field(default_factory=list)
    timeout_seconds: float = TIMEOUT_SECONDS

    def prepare(self) -> None:
        """Write the model, the plan and the faults."""
        (self.folder / "model.py").write_text(MODEL)
        (self.folder / f"{self.name}.faults").write_text(json.dumps(self.faults))
        if not self.plan.exists():
            command = [sys.executable, "-m", "shardfold", "plan", self.model]
            run([*command, "--cluster", self.cluster, "--save", str(self.plan)])

    @property
    def model(self) -> str:
        """The model, as the command line takes it."""
        return f"{self.folder / 'model.py'}:make"

    @property
    def plan(self) -> Path:
        """The plan's file."""
        return self.folder / f"{self.cluster}.json"

    @property
    def log(self) -> Path:
        """A line for every start, step and fault."""
        return self.folder / f"{self.name}.log"

    @property
    def said(self) -> Path:
        """What all processes wrote to their standard error."""
        return self.folder / f"{self.name}.err"

    @property
    def saved(self) -> Path:
        """The folder of checkpoints."""
        return self.checkpoints or self.folder / f"{self.name}-checkpoints"

    def command(self, *torchrun: str) -> list[str]:
        """The whole command, with torchrun's options."""
        return [sys.executable, "-m", "torch.distributed.run", *torchrun, *self.arguments()]

    def arguments(self) -> list[str]:
        """The program that every rank runs, and what it is given."""
        return [
            *(str(POINTS), str(self.folder / f"{self.name}.faults"), str(self.log)),
            *("train", self.model, "--plan", str(self.plan), "--steps", str(self.steps)),
            *("--lr", "0.01", "--checkpoints", str(self.saved), "--save-every", str(EVERY)),
            *("--timeout", str(self.timeout_seconds)),
        ]

    def start(self, *torchrun: str) -> subprocess.Popen[bytes]:
        """Start it on this machine."""
        return started(self.command(*torchrun), self.said)

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """The log's lines of a kind."""
        if not self.log.exists():
            return []
        whole = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in whole if line["kind"] == kind]

    def losses(self) -> dict[int, float]:
        """The loss of every step, as rank 0 last saw it."""
        return {line["step"]: line["loss"] for line in self.lines("step") if line["rank"] == 0}

    def wait_for(self, kind: str, count: int, seconds: float = 300) -> None:
        """Wait until the log has so many lines of a kind."""
        deadline = time.monotonic() + seconds
        while len(self.lines(kind)) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{count} lines of {kind} were not seen in {seconds} s")
            time.sleep(0.05)


def started(command: list[str], said: Path, **chosen: str) -> subprocess.Popen[bytes]:
    """A process of its own session, with one thread, whose errors are added to a file."""
    with said.open("ab") as errors:
        return subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", **chosen},
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )


def run(command: list[str]) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, check=True, capture_output=True, env={**os.environ})


def largest_difference(found: dict[int, float], expected: dict[int, float]) -> float:
    """The largest relative difference of any step's loss; infinite where steps are missing."""
    if set(found) != set(expected):
        return float("inf")
    return max(abs(found[k] - expected[k]) / abs(expected[k]) for k in expected)
