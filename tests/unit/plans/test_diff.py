"""What differs between two plans is told, once for what repeats, and nothing else is."""

from __future__ import annotations

import msgspec
import pytest

from shardfold.errors import PlanError
from shardfold.plans import Plan
from shardfold.plans.diff import difference

from .made import collective, made


def changed(plan: Plan, ending: str, **fields: object) -> Plan:
    """The plan with other fields in every operator whose module ends so."""
    operators = tuple(
        msgspec.structs.replace(entry, **fields) if entry.module.endswith(ending) else entry
        for entry in plan.operators
    )
    return msgspec.structs.replace(plan, operators=operators)


def test_a_plan_does_not_differ_from_itself() -> None:
    found = difference(made(), made())
    assert found.lines == ()
    assert found.same == found.operators == 14
    assert found.parameters == 0


def test_repeats_that_differ_alike_are_one_line() -> None:
    found = difference(made(), changed(made(), "attention.query", split={"batch": 32}))
    (line,) = found.lines
    assert (line.place, line.kind, line.count) == ("model.layers.*.attention.query", "linear", 2)
    assert line.splits == ("batch/4 heads/8", "batch/32")
    assert line.seconds == (0.1, 0.1)
    assert found.same == 12


def test_repeats_that_differ_in_different_ways_are_told_apart() -> None:
    other = changed(made(), "0.attention.query", split={"batch": 32})
    found = difference(made(), changed(other, "1.attention.query", split={}))
    assert [line.splits[1] for line in found.lines] == ["batch/32", "unsplit"]


def test_collectives_that_differ_count_too() -> None:
    gather = collective("backward", "all_gather", "gpu0", "gpu1", mib=4, seconds=0.02)
    (line,) = difference(made(), changed(made(), "attention.key", collectives=(gather,))).lines
    assert line.splits[0] == line.splits[1]
    assert line.traffic == ("backward all-reduce node/4", "backward all-gather gpu/8")


def test_collectives_over_other_numbers_of_devices_differ() -> None:
    mesh = tuple(msgspec.structs.replace(a, size=8) if a.name == "node" else a for a in made().mesh)
    lines = difference(made(), msgspec.structs.replace(made(), mesh=mesh)).lines
    assert {line.place.rpartition(".")[2] for line in lines} == {"query", "key", "head"}


def test_the_names_of_axes_do_not_matter() -> None:
    swapped = {"gpu0": "a", "gpu1": "b", "node": "c"}
    renamed = msgspec.structs.replace(
        made(),
        mesh=tuple(msgspec.structs.replace(a, name=swapped[a.name]) for a in made().mesh),
        operators=tuple(
            msgspec.structs.replace(
                entry,
                collectives=tuple(
                    msgspec.structs.replace(c, axes=tuple(swapped[a] for a in c.axes))
                    for c in entry.collectives
                ),
            )
            for entry in made().operators
        ),
    )
    assert difference(made(), renamed).lines == ()


def test_the_largest_difference_in_time_comes_first() -> None:
    other = changed(made(), "attention.query", split={}, seconds=0.06)
    found = difference(made(), changed(other, "head", split={}, seconds=3.0))
    assert [line.place for line in found.lines] == [
        "model.head",
        "model.layers.*.attention.query",
    ]


def test_plans_of_different_models_are_refused() -> None:
    fewer = msgspec.structs.replace(made(), operators=made().operators[1:])
    with pytest.raises(PlanError, match="one has 14 operators, the other 13"):
        difference(made(), fewer)
    with pytest.raises(PlanError, match=r"where one has linear \(aten.linear\), the other has"):
        difference(made(), changed(made(), "attention.query", kind="aten.mm"))
