"""`shardfold check` agrees with a right plan, and names the operator that a wrong rule spoils."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardfold.cli import main
from shardfold.operators.notation import Call, Rule
from shardfold.plans.files import save
from shardfold.runtime import ranks

from .choices import Chooser, chooser
from .ranks import Launch

MODEL = """
import torch
from torch import nn
from shardfold.operators.reductions import TABLE

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.down(torch.cumsum(self.up(x), 1)).square().mean()

def make():
    torch.manual_seed(0)
    return Model(), (torch.randn(4, 8),), {}
"""
WRONG = '''
from dataclasses import replace

def along(call):
    """A running sum whose own dim may be split: it may not."""
    return replace(TABLE["aten.cumsum"].rule(call), whole=frozenset(), linear=())

RULES = {"aten.cumsum": along}
'''


def wrong(call: Call) -> Rule:
    from dataclasses import replace

    from shardfold.operators.reductions import TABLE

    return replace(TABLE["aten.cumsum"].rule(call), whole=frozenset(), linear=())


def split_running_sum(folder: Path) -> tuple[str, str]:
    """A model file with a wrong rule, and a plan that uses it."""
    file = folder / "model.py"
    file.write_text(MODEL + WRONG)
    namespace: dict[str, object] = {}
    exec(MODEL, namespace)
    rules = {"aten.cumsum": wrong}
    chooser = Chooser(*namespace["make"](), "2xcpu", "2", rules=rules)  # type: ignore[operator]
    choice = [0] * len(chooser.tables.vertices)
    for v, vertex in enumerate(chooser.tables.vertices):
        if vertex.space is not None and chooser.graph.ops[vertex.index].kind == "aten.cumsum":
            choice[v] = vertex.space.configs[:, 0].tolist().index(1)
    save(chooser.plan(tuple(choice)), folder / "plan.json")
    return f"{file}:make", str(folder / "plan.json")


def test_a_wrong_rule_is_found_and_its_operator_named(tmp_path: Path) -> None:
    model, plan = split_running_sum(tmp_path)
    found = CliRunner().invoke(main, ["check", model, "--plan", plan, "--local", "2"])
    assert found.exit_code == 1, found.output
    assert "First to differ: operator cumsum (aten.cumsum" in found.output
    assert "split as i1" in found.output


@pytest.fixture
def _ranks_that_stay(on_ranks: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """How `--local` starts processes is what the test above tells."""
    monkeypatch.setattr(ranks, "launch", on_ranks)


@pytest.mark.usefixtures("_ranks_that_stay")
def test_a_right_plan_agrees_and_trains(tmp_path: Path) -> None:
    choices = chooser("gpt2-tiny", "2xcpu", "2")
    file = tmp_path / "plan.json"
    save(next(choices.baselines()), file)
    given = ["gpt2-tiny", "--plan", str(file), "--local", "2"]
    found = CliRunner().invoke(main, ["check", *given])
    assert found.exit_code == 0, found.output
    assert "Same loss" in found.output
    found = CliRunner().invoke(main, ["train", *given, "--steps", "3"])
    assert found.exit_code == 0, found.output
    assert "3 steps: loss 5." in found.output
    assert "tokens/s, MFU" in found.output
    text = tmp_path / "text.txt"
    text.write_bytes(b"all work and no play makes a dull test. " * 40)
    told = ["--steps", "12", "--data", str(text), "--clip", "1", "--warmup", "2", "--json"]
    found = CliRunner().invoke(main, ["train", *given, *told])
    assert found.exit_code == 0, found.output
    figures = json.loads(found.stdout)
    assert figures["last_loss"] < figures["first_loss"] - 0.1
    assert (len(figures["steps"]), figures["devices"]) == (12, 2)
    assert figures["steps"][0]["loss"] == figures["first_loss"]
    assert 0 < figures["mfu"] < 1
    assert figures["tokens_per_second"] == 16 * figures["samples_per_second"] > 0


@pytest.mark.usefixtures("_ranks_that_stay")
def test_a_plan_for_another_model_or_number_of_processes_is_refused(tmp_path: Path) -> None:
    choices = chooser("rnnlm-tiny", "2xcpu", "2")
    file = tmp_path / "plan.json"
    save(next(choices.baselines()), file)
    found = CliRunner().invoke(main, ["check", "alexnet-tiny", "--plan", str(file), "--local", "2"])
    assert found.exit_code == 2
    assert "The plan is for another model" in found.output
    found = CliRunner().invoke(main, ["train", "rnnlm-tiny", "--plan", str(file), "--local", "3"])
    assert found.exit_code == 2
    assert "The plan is for 2 processes, not --local 3." in found.output
    found = CliRunner().invoke(main, ["train", "rnnlm-tiny", "--plan", str(file)])
    assert found.exit_code == 2
    assert "start them here with --local 2" in found.output
