from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from shardfold.cli import main

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def planned(model: str) -> dict:
    result = CliRunner().invoke(main, ["plan", model, "--cluster", "8xa100", "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def example(name: str, monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(name)


def test_a_model_of_ones_own() -> None:
    figures = planned(f"{EXAMPLES / 'own_model.py'}:make")
    assert 0 < figures["additive_lower_bound_seconds"] <= figures["additive_seconds"]
    assert not [entry for entry in figures["unsplit_ops"] if entry["reason"] == "no rule"]


def test_a_rule_of_ones_own(tmp_path: Path) -> None:
    figures = planned(f"{EXAMPLES / 'own_rule.py'}:make")
    assert figures["unsplit_ops"] == []


def test_without_the_rule_splits_are_found_by_experiment(monkeypatch) -> None:
    module = example("own_rule", monkeypatch)
    monkeypatch.delattr(module, "RULES")
    figures = planned("own_rule:make")
    (entry,) = figures["experiments"]
    assert (entry["kind"], entry["count"]) == ("mine.low_rank", 1)
    assert entry["splits"] == "i0 i1, i2 i1, i3 i2 -> i0 i3"
    assert figures["unsplit_ops"] == []


def test_the_demo_says_what_it_found_and_what_to_try(monkeypatch, capsys) -> None:
    pytest.importorskip("transformers")
    demo = example("demo", monkeypatch)
    case = demo.Case("alexnet-tiny", "2x2x1080ti")
    monkeypatch.setattr(demo, "SHOWN", case)
    monkeypatch.setattr(
        demo, "CASES", (case, demo.Case("gpt2-tiny", "2xa100", "bf16", {"layers": 1}))
    )
    demo.main()
    output = capsys.readouterr().out
    assert "Planned alexnet-tiny on 2x2x1080ti" in output
    assert "gpt2-tiny (1 layers)" in " ".join(output.split())
    assert "shardfold plan gpt2 --cluster 8xa100" in output
    rows = [line.split() for line in output.partition("apart")[2].splitlines()]
    steps = {int(row[0]): row[1:3] for row in rows if len(row) == 4 and row[0].isdigit()}
    assert sorted(steps) == [0, 3, 6, 9, 11]
    assert all(abs(float(two) - float(one)) < 1e-4 for two, one in steps.values())
    assert float(steps[11][0]) < float(steps[0][0])


def test_the_demo_plans_models_that_exist(monkeypatch) -> None:
    from shardfold import zoo
    from shardfold.cluster import parse

    for case in example("demo", monkeypatch).CASES:
        assert zoo.entry(case.model)
        assert parse(case.cluster).size > 1
