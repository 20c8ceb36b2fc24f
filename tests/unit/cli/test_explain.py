from __future__ import annotations

import json
from pathlib import Path

import pytest

MARKUP = """
import torch
from torch import nn


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("[bold red]fc[/]", nn.Linear(64, 64))

    def forward(self, x):
        return getattr(self, "[bold red]fc[/]")(x).square().mean()


def make():
    return Odd(), (torch.zeros(32, 64),), {}
"""
ON = ("--cluster", "2x2xh100")


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_model_is_planned_and_explained(run, model_file) -> None:
    result = run("explain", f"{model_file}:make", "fc", *ON)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "fc linear (linear)" in result.stdout
    assert "the cost changes by" in words(result.stdout)
    assert "chatter" not in result.stdout


def test_a_saved_plan_is_explained_with_its_pins(run, model_file, tmp_path) -> None:
    model, saved = f"{model_file}:make", tmp_path / "plan.json"
    planned = run("plan", model, *ON, "--pin", "fc=out/2", "--save", saved)
    assert "Pinned: fc=out/2 (1 operator). The pins cost" in words(planned.stdout)
    result = run("explain", saved, "fc", "--model", model, "--json")
    assert result.exit_code == 0, result.output
    (reason,) = json.loads(result.stdout)["reasons"]
    assert reason["is_pinned"] is True
    assert reason["operator"]["split"] == {"out": 2}
    assert "Pinned: fc=out/2" in run("show", saved).stdout


def test_pins_are_in_the_json_and_cost_something_or_nothing(run, model_file) -> None:
    model = f"{model_file}:make"
    free = json.loads(run("plan", model, *ON, "--json").stdout)
    assert (free["pins"], free["free_step_seconds"]) == ([], None)
    found = json.loads(run("plan", model, *ON, "--pin", "fc=out/4", "--json").stdout)
    assert found["pins"] == [{"pattern": "fc", "split": "out/4", "operators": 1}]
    assert found["free_step_seconds"] == pytest.approx(free["step_seconds"])
    assert found["step_seconds"] >= free["step_seconds"]


def test_impossible_pins_are_refused_with_what_is_possible(refused, model_file) -> None:
    model = f"{model_file}:make"
    message = refused("plan", model, *ON, "--pin", "fc=out/3")
    assert "The pin 'fc=out/3' cannot be followed" in message
    assert "out/2" in message
    assert "Did you mean fc?" in refused("plan", model, *ON, "--pin", "fcc=out/2")
    assert "cannot be read" in refused("plan", model, *ON, "--pin", "fc")
    assert "No operator matches 'nowhere'" in refused("explain", model, "nowhere", *ON)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("MODEL",), "MODEL needs a --cluster"),
        (("MODEL", *ON, "--model", "x"), "--model goes with PLAN.json"),
        (("plan.json",), "PLAN.json needs its --model"),
        (("plan.json", "--model", "x", *ON), "--cluster goes with MODEL"),
        (("plan.json", "--model", "x", "--pin", "fc=out"), "--pin goes with MODEL"),
        (("plan.json", "--model", "x", "--memory-limit", "1G"), "--memory-limit goes with MODEL"),
    ],
)
def test_options_that_do_not_go_together_are_refused(refused, arguments, message) -> None:
    assert message in refused("explain", *arguments)


def test_markup_in_a_models_names_is_text(run, tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_text(MARKUP)
    told = run("explain", f"{file}:make", *ON)
    assert told.exit_code == 0, told.output
    assert "[bold red]fc[/] linear" in told.stdout
    planned = run("plan", f"{file}:make", *ON, "--pin", "*fc[[]/]=out/2")
    assert planned.exit_code == 0, planned.output
    assert "Pinned: *fc[[]/]=out/2 (1 operator)." in words(planned.stdout)
    assert "[bold red]fc[/]" in words(planned.stdout)


H200 = Path(__file__).parents[3] / "benchmarks" / "profiles" / "h200.json"


def test_a_plan_by_a_profile_is_explained_by_it(run, refused, model_file, tmp_path) -> None:
    model, saved = f"{model_file}:make", tmp_path / "plan.json"
    profile = tmp_path / "machine.json"
    profile.write_bytes(H200.read_bytes())
    made = ("--cluster", "2xh200", "--dtype", "bf16", "--profile", profile)
    assert run("plan", model, *made, "--save", saved).exit_code == 0
    asked = ("explain", saved, "fc", "--model", model, "--seconds", 0)
    found = run(*asked, "--profile", H200, "--json")
    assert found.exit_code == 0, found.output
    direct = run("explain", model, "fc", *made, "--seconds", 0, "--json")
    assert json.loads(found.stdout) == json.loads(direct.stdout)
    assert json.loads(run(*asked, "--json").stdout) == json.loads(direct.stdout)
    profile.unlink()
    assert "--profile" in refused(*asked)  # its prices are not in the plan
