"""`shardfold report` writes one page, or says why it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardfold.cli import main


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    options = ("--cluster", "2x2xa100", "--cost", "roofline")  # by kernels, hosts would decide
    run("plan", "alexnet-tiny", *options, "--save", str(path))
    return path


def run(*arguments: str, code: int = 0):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == code, result.output
    return result


def test_the_page_is_written_beside_the_plan(saved: Path) -> None:
    result = run("report", str(saved))
    page = saved.with_suffix(".html")
    assert str(page) in result.stdout
    assert page.read_text().startswith("<!doctype html>")


def test_a_model_brings_runner_ups(saved: Path, tmp_path: Path) -> None:
    arguments = ("--model", "alexnet-tiny", "--explain", "fc*", "--json")
    found = json.loads(run("report", str(saved), *arguments).stdout)
    explained = [found["ops"][int(k)]["module"] for k in found["reasons"]]
    assert explained
    assert all(module.startswith("fc") for module in explained)
    least = json.loads(saved.read_text())["estimate"]["additive_lower_bound_seconds"]
    for reason in found["reasons"].values():
        costs = [cost for _, cost, _ in reason["others"] if cost is not None]
        assert min(reason["additive"], *costs) >= least * (1 - 1e-9)


def test_a_comparison_is_added(saved: Path, tmp_path: Path) -> None:
    compared = tmp_path / "compare.json"
    result = run(
        "compare",
        "alexnet-tiny",
        "--cluster",
        "2x2xa100",
        "--methods",
        "krizhevsky-2014,additive-optimum",
        "--json",
    )
    compared.write_text(result.stdout)
    found = json.loads(run("report", str(saved), "--compare", str(compared), "--json").stdout)
    names = [rival["name"] for rival in found["rivals"]]
    assert "krizhevsky-2014" in names
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.json",), "Cannot read the plan missing.json"),
        (("PLAN", "--batch", "3"), "--batch goes with --model"),
        (("PLAN", "--explain", "fc6"), "--explain goes with --model"),
        (("PLAN", "-o", "no/such/folder/x.html"), "does not exist"),
        (("PLAN", "--compare", "PLAN"), "is not what shardfold compare"),
    ],
)
def test_refusals(saved: Path, arguments: tuple[str, ...], message: str) -> None:
    given = [str(saved) if word == "PLAN" else word for word in arguments]
    assert message in run("report", *given, code=2).output
