"""The pages of results are what their programs write from the measured figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardfold.costs.accuracy import SPREADS
from shardfold.costs.registry import DEFAULT
from shardfold.costs.registry import MEASURED as MEASURED_COST

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "benchmarks" / "results"
PAGES = ROOT / "docs" / "results"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A program of `benchmarks/` as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module


def read(*files: Path) -> list[Any]:
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize(
    ("name", "page", "files"),
    [
        ("at_scale", "at-scale.md", ("at-scale.json",)),
        ("compare_page", "compare.md", ("compare.json",)),
        ("folding", "folding.md", ("folding.json",)),
        ("gaps", "gaps.md", ("gaps.json",)),
        ("numerics", "numerics.md", ("numerics.json", "numerics-mixtures.json")),
        ("pipelines", "pipelines.md", ("pipelines.json",)),
        ("published_page", "published.md", ("published.json",)),
        ("stacks", "stacks.md", ("stacks.json", "stacks-run.json")),
        ("trainer", "trainer.md", ("trainer.json",)),
    ],
)
def test_a_page(program, name: str, page: str, files: tuple[str, ...]) -> None:
    assert program(name).page(*read(*(MEASURED / f for f in files))) == (PAGES / page).read_text()


def test_models_that_nobody_tuned_for(program) -> None:
    foreign = program("foreign")
    files = [MEASURED / path.name for path in foreign.RESULTS.values()]
    sets = dict(zip(foreign.RESULTS, read(*files), strict=True))
    assert foreign.page_of(sets) == (PAGES / "foreign.md").read_text()


def test_predictions_on_an_h200(program) -> None:
    (figures,) = read(PAGES / "fidelity.json")
    assert (
        program("fidelity").page(figures["cases"], figures) == (PAGES / "fidelity.md").read_text()
    )


def test_predictions_on_processes_of_one_machine(program) -> None:
    made = program("fidelity_gloo_page")
    results = read(*(MEASURED / f"fidelity-gloo-{k}.json" for k in (2, 4)))
    assert made.page(results) == (PAGES / "fidelity-gloo.md").read_text()
    assert made.draw(results) == (PAGES / "fidelity-gloo.svg").read_text()


def test_configurations_that_others_published(program) -> None:
    (whole,) = read(MEASURED / "torchtitan.json")
    assert program("torchtitan").page(whole["rows"]) == (PAGES / "torchtitan.md").read_text()


def test_the_papers_page(program, tmp_path: Path) -> None:
    for file in PAGES.glob("papers-*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    program("papers_page").write(tmp_path)
    for name in ("papers.md", "papers-depth.svg"):
        assert (tmp_path / name).read_text() == (PAGES / name).read_text()


def test_the_papers_strategies(program) -> None:
    made, (whole,) = program("table2"), read(PAGES / "paper-strategies.json")
    text = (PAGES / "paper-strategies.md").read_text()
    for name, part in (("strategies", made.table), ("totals", made.totals)):
        assert made.fill(text, name, part(whole["models"])) == text


def test_figures(program) -> None:
    (search,) = read(MEASURED / "search.json")
    assert program("search_figure").draw(search) == (PAGES / "search.svg").read_text()
    (readme,) = read(PAGES / "readme.json")
    assert program("readme").figure(readme["results"]) == (PAGES / "speedup.svg").read_text()


def test_the_range_of_a_prediction_is_that_of_measured_steps() -> None:
    *foreign, published = read(
        MEASURED / "foreign-h200.json",
        MEASURED / "foreign-h200-second.json",
        MEASURED / "foreign-h200-third.json",
        MEASURED / "foreign-h200-fourth.json",
        MEASURED / "published.json",
    )
    gloo = [
        case
        for each in read(*(MEASURED / f"fidelity-gloo-{k}.json" for k in (2, 4)))
        for case in each["cases"]
    ]
    one = [row for each in foreign for row in each["rows"] if "error" not in row]
    compiled = [row for row in one if "compiled_seconds" in row]
    rows = [row for row in published["rows"] if row.get("error") is not None]
    assert published["cost"] == DEFAULT
    stages = [row for row in rows if "pp=" in row["strategy"] and row["stack"] != "nanotron"]
    plain = [row for row in rows if "pp=" not in row["strategy"]]
    measured = {
        (DEFAULT, "one device"): [row["step_seconds"] / row["default_seconds"] for row in one],
        (DEFAULT, "compiled"): [
            row["compiled_seconds"] / row["compiled_default_seconds"] for row in compiled
        ],
        (DEFAULT, "several"): [1 / (1 + row["error"]) for row in plain],
        (DEFAULT, "pipeline"): [1 / (1 + row["error"]) for row in stages],
        (MEASURED_COST, "one device"): [r["step_seconds"] / r["profile_seconds"] for r in one],
        (MEASURED_COST, "several"): [c["measured_seconds"] / c["predicted_seconds"] for c in gloo],
    }
    assert measured.keys() == SPREADS.keys()
    for kind, ratios in measured.items():
        low, high = np.quantile(ratios, [0.1, 0.9])
        assert (SPREADS[kind].low, SPREADS[kind].high) == (round(low, 2), round(high, 2)), kind
        assert SPREADS[kind].cases.startswith(f"{len(ratios)} ")
