"""Pins: honoured or refused with a reason, never cheaper than the best, and kept in the file."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardfold as sf
from shardfold import zoo
from shardfold.capture import capture
from shardfold.errors import InputError
from shardfold.graph import Graph
from shardfold.graph.graph import shared_prefix, without
from shardfold.plans import dumps
from shardfold.report.units import seconds
from shardfold.strategies.pins import Pin, matching, parse_pins
from virtual.models import Language, tokens


def pinned(pins: object, **options: object) -> sf.Plan:
    return sf.plan(
        Language(),
        (tokens(),),
        {"labels": tokens()},
        cluster="4xa100",
        cost="roofline",  # by kernels, the host of so small a model would decide
        pins=pins,  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )


def splits(plan: sf.Plan, module: str, kind: str = "linear") -> list[dict[str, int]]:
    return [
        entry.split
        for entry in plan.operators
        if entry.module == module and entry.kind == f"aten.{kind}"
    ]


@pytest.mark.parametrize(
    ("text", "split", "is_allowed"),
    [
        ("batch/4 out/2", {"out": 2, "batch": 4}, True),
        ("batch/4", {"batch": 4, "out": 2}, False),
        ("batch/4 *", {"batch": 4, "out": 2}, True),
        ("batch/4 *", {"batch": 2, "out": 2}, False),
        ("out", {"out": 8}, True),
        ("out", {}, False),
        ("unsplit", {}, True),
        ("unsplit", {"out": 2}, False),
        ("*", {"out": 2}, True),
    ],
)
def test_what_a_pin_allows(text: str, split: dict[str, int], is_allowed: bool) -> None:
    assert Pin.parse("fc", text).allows(split) is is_allowed


@pytest.mark.parametrize(
    "text", ["fc", "fc=", "=out/2", "fc=out/x", "fc=out/1", "fc=out/2 out/4", "fc=unsplit out/2"]
)
def test_a_pin_that_cannot_be_read_is_refused_with_examples(text: str) -> None:
    with pytest.raises(InputError, match=r"cannot be read.*'layers\.\*\.mlp\.up_proj=out/8'"):
        parse_pins([text])


def test_pins_are_texts_or_a_mapping() -> None:
    assert parse_pins(["a=b=out/2"]) == parse_pins({"a=b": "out/2"})
    assert parse_pins(None) == ()


def test_patterns_name_modules_and_operators(graph: Graph) -> None:
    paths = {op.origin.module for op in graph.ops if op.origin.module}
    path = sorted(paths)[0]
    (group,) = matching(path, graph)
    assert {graph.ops[i].origin.module for i in group} == {path}
    name = graph.ops[3].name
    assert [3] in matching(f":{name}", graph)
    with pytest.raises(InputError, match=r"No operator matches 'nothing\.here'"):
        matching("nothing.here", graph)


def test_a_pinned_split_is_honoured_and_costs_what_the_plan_says(plan: sf.Plan) -> None:
    target = next(e for e in plan.operators if e.kind == "aten.linear")
    others = [{"batch": 2}, {"out": 2}, {}]
    for split in others:
        words = " ".join(f"{k}/{v}" for k, v in split.items()) or "unsplit"
        found = pinned({target.module: words})
        assert splits(found, target.module) == [split]
        assert found.pinned is not None
        assert found.pinned.free_seconds == pytest.approx(plan.estimate.step_seconds, rel=1e-9)
        assert found.pinned.free_additive_seconds == pytest.approx(
            plan.estimate.additive_seconds, rel=1e-9
        )
        assert found.estimate.step_seconds >= found.pinned.free_seconds
        assert found.estimate.additive_seconds >= found.pinned.free_additive_seconds
        assert found.estimate.additive_seconds >= found.estimate.additive_lower_bound_seconds
        assert found.estimate.step_seconds >= found.estimate.step_lower_bound_seconds
        assert "The pins cost" in str(found)
        assert f"{target.module}={words} (" in " ".join(str(found).split())


def test_pins_are_held_against_the_baselines_of_the_plan_without_them(plan: sf.Plan) -> None:
    target = next(e for e in plan.operators if e.kind == "aten.linear")
    found = pinned({target.module: "unsplit"})
    for figure in ("seconds", "bytes", "recomputes"):
        for name in ("data_parallel", "fully_sharded"):
            field = f"{name}_{figure}"
            assert getattr(found.estimate, field) == getattr(plan.estimate, field)
    baselines = [f for f in plan.finalists if f.is_baseline]
    assert [f for f in found.finalists if f.is_baseline] == baselines
    more = found.estimate.step_seconds - plan.estimate.step_seconds
    assert f"The pins cost {seconds(more)} of the step" in str(found)


def test_pinning_what_is_best_costs_nothing(plan: sf.Plan) -> None:
    pins = [
        f":{e.name}=" + (" ".join(f"{k}/{v}" for k, v in e.split.items()) or "unsplit")
        for e in plan.operators
    ]
    found = pinned(pins, mesh="x".join(str(axis.size) for axis in plan.mesh))
    assert [e.split for e in found.operators] == [e.split for e in plan.operators]
    assert found.estimate.step_seconds == pytest.approx(plan.estimate.step_seconds, rel=1e-9)
    assert "The pins cost 0 s of the step (0.00%)." in str(found)


def test_a_pin_that_no_configuration_satisfies_names_what_is_possible(plan: sf.Plan) -> None:
    target = next(e for e in plan.operators if e.kind == "aten.linear")
    with pytest.raises(InputError) as caught:
        pinned({target.module: "out/3"})
    message = str(caught.value)
    assert f"The pin '{target.module}=out/3' cannot be followed" in message
    assert "aten.linear" in message
    assert "out/2" in message.partition("Possible there:")[2]


def test_pins_that_contradict_are_refused(plan: sf.Plan) -> None:
    target = next(e for e in plan.operators if e.kind == "aten.linear")
    with pytest.raises(InputError, match="cannot be followed"):
        pinned([f"{target.module}=out/2", f"{target.module}=batch/2"])


def test_pins_survive_the_file_and_plans_without_pins_read_as_before(
    plan: sf.Plan, tmp_path: Path
) -> None:
    target = next(e for e in plan.operators if e.kind == "aten.linear")
    found = pinned({target.module: "out/2"})
    found.save(tmp_path / "plan.json")
    assert sf.Plan.load(tmp_path / "plan.json") == found
    assert '"pinned"' not in dumps(plan)


@pytest.fixture(scope="module")
def llama() -> Graph:
    return capture(*zoo.build("llama3-8b-tiny"))


@pytest.mark.parametrize(
    "pattern",
    [
        "layers.*.mlp.up_proj",
        "model.layers.*.mlp.up_proj",
        "model.model.layers.*.mlp.up_proj",
        "*.mlp.up_proj",
    ],
)
def test_a_path_matches_in_full_and_without_leading_names(llama: Graph, pattern: str) -> None:
    paths = {
        llama.ops[index].origin.module for group in matching(pattern, llama) for index in group
    }
    assert paths == {p.origin.module for p in llama.ops if p.origin.module.endswith("mlp.up_proj")}
    assert len(paths) > 1


def test_leading_names_are_left_out_only_where_nothing_is_called_so(llama: Graph) -> None:
    (group,) = matching("layers.0.mlp.up_proj", llama)
    assert {llama.ops[i].origin.module.rpartition("layers.0.")[2] for i in group} == {"mlp.up_proj"}
    with pytest.raises(InputError, match=r"No operator matches '0\.mlp\.up_proj'"):
        matching("0.mlp.up_proj", llama)


def test_every_name_that_a_plan_shows_can_be_pinned(llama: Graph) -> None:
    skip = shared_prefix([op.origin.module for op in llama.ops])
    for op in llama.ops:
        if op.origin.module:
            shown = without(op.origin.module, skip) or op.origin.module
            found = {llama.ops[i].origin.module for group in matching(shown, llama) for i in group}
            assert op.origin.module in found
            assert len(found) == 1 or shown == "model"  # the wrapper's own name, too
