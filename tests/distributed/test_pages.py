"""The training scripts of the documentation, typed as printed, run on two processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from torch.distributed.run import get_args_parser

from shardfold.cli import main
from shardfold.runtime import ranks

from .ranks import Launch
from .torchrun import start_as_torchrun

ROOT = Path(__file__).resolve().parents[2]
# What the page of the runner leaves to the reader: a model, its batch and the data.
MINE = """import torch
from torch import nn

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()

def make():
    torch.manual_seed(0)
    return Mine(), (torch.randn(8, 16),), {}
"""
GIVEN = """from mine import make
model, args, kwargs = make()
data = [args] * 2
"""


def blocks(page: str, kind: str) -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def shardfold(line: str) -> str:
    result = CliRunner().invoke(main, shlex.split(line)[1:])
    assert result.exit_code == 0, result.output
    return result.stdout


def started(torchrun: str, folder: Path) -> str:
    """Run a line that `shardfold launch` printed, in the folder of its plan and script."""
    name, *rest = shlex.split(torchrun)
    assert name == "torchrun"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *rest],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def script_of(page: str) -> str:
    return next(text for text in blocks(page, "python") if "sf.parallelize" in text)


def test_a_script_runs_under_torchrun_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(script_of("docs/how-to/launch.md"))
    monkeypatch.chdir(tmp_path)
    shardfold("shardfold plan gpt2-tiny --cluster 2xcpu --save plan.json")
    printed = shardfold("shardfold launch plan.json -- train.py").strip()
    # Lines of two processes may come as one.
    said = re.findall(r"step 2: loss \d+\.\d{4}", started(printed, tmp_path))
    assert len(said) == 2
    assert said[0] == said[1]  # the loss of the whole batch, on both ranks


def ran(rank: int, folder: Path) -> float:
    """The last loss of the script in a folder."""
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        found = runpy.run_path("train.py", run_name="__main__")
    sys.modules.pop("mine", None)
    return float(found["loss"])


def test_a_loop_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_ranks: Launch
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "train.py").write_text(GIVEN + script_of("docs/explanation/running.md"))
    monkeypatch.chdir(tmp_path)
    shardfold("shardfold plan mine.py:make --cluster 2xcpu --save plan.json")
    first, second = on_ranks(ran, 2, tmp_path)
    assert first == second  # the loss of the whole batch, on both ranks


def test_the_page_prints_what_launch_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = "docs/how-to/launch.md"
    lines = [line for text in blocks(page, "sh") for line in text.splitlines()]
    plan, launch = lines[lines.index("shardfold launch plan.json -- train.py") - 1 :][:2]
    monkeypatch.chdir(tmp_path)
    shardfold(plan)
    assert shardfold(launch) in blocks(page, "text")


def test_training_goes_on_where_it_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_ranks: Launch
) -> None:
    monkeypatch.setattr(ranks, "launch", on_ranks)  # `test_check.py` tells how `--local` starts
    (text,) = [text for text in blocks("docs/how-to/resume.md", "console") if "train" in text]
    line = text.removeprefix("$ ").strip()
    assert "--steps 1000 " in line
    monkeypatch.chdir(tmp_path)
    shardfold("shardfold plan gpt2-tiny --cluster 2xcpu --save plan.json")
    taken = []
    for steps in (2, 4):  # the second time: the same command again
        said = shardfold(f"{line.replace('--steps 1000', f'--steps {steps}')} --json")
        taken.append([step["number"] for step in json.loads(said)["steps"]])
    assert taken == [[0, 1], [2, 3]]


def test_the_elastic_line_is_one_of_torchrun_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that come and go are those of benchmarks/faults.py."""
    (text,) = [text for text in blocks("docs/how-to/resume.md", "sh") if "torchrun " in text]
    _, line = text.replace("\\\n", " ").splitlines()
    given = get_args_parser().parse_args(shlex.split(line)[1:])
    assert (given.nnodes, given.module, given.training_script) == ("2:4", True, "shardfold")
    train = shlex.join(given.training_script_args)
    assert train.startswith("train gpt2 --plan plan.json --checkpoints /shared/run ")
    train = train.replace("gpt2", "gpt2-tiny").replace("/shared/run", "run") + " --steps 2"
    monkeypatch.chdir(tmp_path)
    shardfold("shardfold plan gpt2-tiny --cluster 2xcpu --save plan.json")
    start_as_torchrun(shlex.split(train), tmp_path, 2)
    assert (tmp_path / "run" / "step-00000002").is_dir()
