"""The training scripts of the documentation, typed as printed, run on two processes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardfold.cli import main

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


@pytest.mark.parametrize(
    ("page", "before", "model", "says"),
    [
        ("docs/how-to/launch.md", "", "gpt2-tiny", "step 2: loss "),
        ("docs/explanation/running.md", GIVEN, "mine.py:make", "loss "),
    ],
)
def test_a_script_runs_as_printed(
    page: str, before: str, model: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = next(text for text in blocks(page, "python") if "sf.parallelize" in text)
    after = "" if "print(" in script else '\nprint("loss", loss.item())\n'
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "train.py").write_text(before + script + after)
    monkeypatch.chdir(tmp_path)
    shardfold(f"shardfold plan {model} --cluster 2xcpu --save plan.json")
    printed = shardfold("shardfold launch plan.json -- train.py").strip()
    said = [line for line in started(printed, tmp_path).splitlines() if says in line]
    assert len(said) == 2
    assert said[0] == said[1]  # the loss of the whole batch, on both ranks


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
