from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def saved(run, model_file: Path) -> Path:
    path = model_file.parent / "plan.json"
    arguments = ("--cluster", "2x2xh100", "--dtype", "bf16", "--save", path)
    assert run("plan", f"{model_file}:make", *arguments).exit_code == 0
    return path


def test_show_prints_what_plan_printed(run, saved, model_file) -> None:
    shown = run("show", saved).stdout
    assert "fc linear" in shown
    assert json.loads(run("show", saved, "--json").stdout)["cluster"] == "2x2xh100"
    assert run("show", saved, "--model", f"{model_file}:make").exit_code == 0


def test_a_plan_for_another_model_or_size_is_refused(refused, saved, model_file) -> None:
    other = refused("show", saved, "--model", "alexnet-tiny")
    assert other.startswith("The plan is for another model: it has no parameter conv1.")
    size = refused("show", saved, "--model", f"{model_file}:make", "--batch", 16)
    assert "another batch size" in size


def test_sizes_without_a_model_mean_nothing(refused, saved) -> None:
    assert refused("show", saved, "--batch", 16) == "--batch goes with --model."


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda text: text[: len(text) // 2], "was it truncated?"),
        (lambda text: text.replace('"version": 2', '"version": 3', 1), "reads up to 2. Upgrade"),
        (lambda text: text.replace("step_seconds", "step_sekonds", 1), "is damaged"),
        (lambda text: "{}", "is not a shardfold plan"),
    ],
)
def test_a_plan_file_that_cannot_be_read(refused, saved, spoil, message: str) -> None:
    saved.write_text(spoil(saved.read_text()))
    before = saved.read_text()
    assert message in refused("show", saved)
    assert saved.read_text() == before
