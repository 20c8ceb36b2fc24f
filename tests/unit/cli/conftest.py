from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shardfold.cli import main

MODELS = """
import torch
from torch import nn


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 32)

    def forward(self, x):
        return self.fc(x)


class Loss(Scores):
    def forward(self, x):
        return self.fc(x).square().mean()


class Branch(Scores):
    def forward(self, x):
        y = self.fc(x)
        return y.sum() if y.sum() > 0 else y.mean()


def make(batch=8):
    print("chatter of the model's own")
    return Loss(), (torch.zeros(batch, 16),), {}


def no_loss():
    return Scores(), (torch.zeros(8, 16),), {}


def branch():
    return Branch(), (torch.zeros(8, 16),), {}


def raises():
    raise KeyError("weights of mine")


def returns_three():
    return 3


def returns_a_bare_tensor():
    return Loss(), torch.zeros(8, 16), {}
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "of_mine.py"
    path.write_text(MODELS)
    return path


@pytest.fixture
def run() -> Callable[..., Result]:
    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(main, [str(argument) for argument in arguments])

    return invoke


@pytest.fixture
def refused(run: Callable[..., Result]) -> Callable[..., str]:
    """Run a command that must end in one message: exit code 2, no traceback, empty stdout."""

    def invoke(*arguments: object) -> str:
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        assert result.stderr.count("Error: ") == 1
        return result.stderr.partition("Error: ")[2].strip()

    return invoke
