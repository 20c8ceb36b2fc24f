from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

QUICK = ("--moves", 1_000, "--methods", "additive-optimum,data-parallel,fsdp,megatron,greedy,mcmc")


def test_the_table_fits_80_columns_and_says_how_it_is_priced(run, model_file) -> None:
    result = run("compare", f"{model_file}:make", "--cluster", "2x2xh100", *QUICK)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "…" not in result.stdout
    for method in ("additive-optimum", "data-parallel", "fsdp", "greedy", "mcmc"):
        assert f"\n{method} " in result.stdout
    assert "megatron: does not apply: the model has no attention." in result.stdout
    assert "without overlap" in result.stdout
    assert "chatter" not in result.stdout


def test_json_is_one_object_with_every_method(run, model_file) -> None:
    result = run("compare", f"{model_file}:make", "--cluster", "2x2xh100", "--json", *QUICK)
    found = json.loads(result.stdout)
    costs = {r["method"]: r["additive_seconds"] for r in found["results"]}
    assert costs["additive-optimum"] == min(cost for cost in costs.values() if cost is not None)
    assert costs["megatron"] is None
    assert found["baseline"] == "data-parallel"
    assert found["cluster"] == "2x2xh100"


def test_the_chart_has_a_bar_a_method(run, model_file, tmp_path) -> None:
    target = tmp_path / "steps.svg"
    result = run(
        "compare", f"{model_file}:make", "--cluster", "2x2xh100", "--chart", target, *QUICK
    )
    assert f"Drawn to {target}" in result.stdout
    drawn = ElementTree.parse(target).getroot()
    space = "{http://www.w3.org/2000/svg}"
    bars = [r for r in drawn.iter(f"{space}rect") if r.get("class") in ("exact", "other")]
    assert len(bars) == 5
    names = [t.text for t in drawn.iter(f"{space}text") if t.get("class") == "name"]
    assert "additive-optimum" in names
    widths = [float(bar.get("width", "0")) for bar in bars]
    assert widths == sorted(widths, reverse=True)


def test_every_method_has_a_plan_like_any_other(run, model_file, tmp_path) -> None:
    folder = tmp_path / "plans"
    model = f"{model_file}:make"
    result = run(
        "compare", model, "--cluster", "2x2xh100", "--save-plans", folder, "--json", *QUICK
    )
    steps = {r["method"]: r["step_seconds"] for r in json.loads(result.stdout)["results"]}
    known = {name for name, step in steps.items() if step is not None}
    assert {path.stem for path in folder.iterdir()} == known
    for name in known:
        shown = run("show", folder / f"{name}.json", "--model", model, "--json")
        assert json.loads(shown.stdout)["step_seconds"] == steps[name]
        assert f"Chosen by {name}." in json.loads(shown.stdout)["notes"]
    found = run("compare", folder / "additive-optimum.json", folder / "data-parallel.json")
    assert found.exit_code == 0


def test_methods_are_listed(run) -> None:
    assert run("compare", "any", "--methods", "list").stdout.splitlines()[0] == "selected"


def test_what_cannot_be_compared(refused, model_file, tmp_path) -> None:
    model = f"{model_file}:make"
    assert "needs --cluster" in refused("compare", model)
    nearest = refused("compare", model, "--cluster", "2xh100", "--methods", "selectd")
    assert nearest == "Unknown method 'selectd'. Did you mean selected?"
    renamed = refused("compare", model, "--cluster", "2xh100", "--methods", "exact")
    assert renamed == "'exact' is now called 'additive-optimum'."
    assert "not 3 arguments" in refused("compare", "a", "b", "c")
    chart = refused("compare", model, "--cluster", "2xh100", "--chart", tmp_path / "no" / "c.svg")
    assert "does not exist" in chart


@pytest.fixture
def saved(run, model_file: Path) -> tuple[Path, Path]:
    paths = (model_file.parent / "a.json", model_file.parent / "b.json")
    for path, cluster in zip(paths, ("2x2xh100", "4x8x1080ti"), strict=True):
        arguments = ("--cluster", cluster, "--batch", 4096, "--save", path)
        assert run("plan", f"{model_file}:make", *arguments).exit_code == 0
    return paths


def test_two_plans_are_held_against_each_other(run, saved) -> None:
    result = run("compare", *saved)
    assert result.exit_code == 0, result.output
    assert "operators are split alike" in result.stdout
    found = json.loads(run("compare", *saved, "--json").stdout)
    assert found["clusters"] == ["2x2xh100", "4x8x1080ti"]
    assert any(line["kind"] == "linear" for line in found["lines"])


def test_a_plan_and_itself_differ_in_nothing(run, saved) -> None:
    found = json.loads(run("compare", saved[0], saved[0], "--json").stdout)
    assert found["lines"] == []
    assert found["parameters"] == 0


def test_options_of_methods_do_not_go_with_plans(refused, saved) -> None:
    assert "goes with one MODEL" in refused("compare", *saved, "--cluster", "8xa100")


H200 = Path(__file__).parents[3] / "benchmarks" / "profiles" / "h200.json"
BF16 = ("--cluster", "2x2xh200", "--dtype", "bf16")


def test_a_profile_prices_every_method(run, model_file) -> None:
    model, methods = f"{model_file}:make", ("--methods", "additive-optimum,data-parallel", "--json")
    plain = json.loads(run("compare", model, *BF16, *methods).stdout)
    measured = json.loads(run("compare", model, *BF16, *methods, "--profile", H200).stdout)
    assert (plain["cost"], measured["cost"]) == ("kernels", "measured")
    for before, after in zip(plain["results"], measured["results"], strict=True):
        assert before["step_seconds"] != after["step_seconds"]


def test_a_profile_of_another_device_is_refused(refused, model_file) -> None:
    model = f"{model_file}:make"
    said = refused("compare", model, "--cluster", "2x2xa100", "--profile", H200)
    assert "The profile is of NVIDIA H200" in said
    assert "has no products in float64" in refused(
        "compare", model, "--cluster", "2x2xh200", "--dtype", "fp64", "--profile", H200
    )
    assert "--profile goes with one MODEL" in refused(
        "compare", "a.json", "b.json", "--profile", H200
    )
