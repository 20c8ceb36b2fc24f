from __future__ import annotations

from math import isclose

import msgspec

from shardfold.report.plan_table import blocks_of, label, main_traffic, shown, times

from ..plans.made import made


def test_repeats_are_one_block_and_wrappers_go_unnamed() -> None:
    layers, rest = blocks_of(made())
    assert (layers.name, layers.repeats) == ("layers.*", ("0", "1"))
    assert rest.name == ""
    assert [label(row) for row in rest.rows] == ["head", ""]


def test_no_second_is_lost() -> None:
    plan = made()
    total = sum(entry.seconds for entry in plan.operators)
    assert isclose(sum(block.seconds for block in blocks_of(plan)), total)
    view = shown(plan)
    assert isclose(sum(block.seconds for block in view.blocks) + view.left_out_seconds, total)
    counted = sum(row.count for block in view.blocks for row in block.rows)
    assert counted + view.left_out == len(plan.operators)


def test_rows_that_differ_in_their_last_name_are_joined() -> None:
    layers = blocks_of(made())[0]
    query = layers.rows[0]
    assert label(query) == "attention.query, key"
    assert query.count == 4
    assert times(query, layers) == ""
    assert isclose(query.traffic[0].seconds, 4 * 0.02)
    assert query.traffic[0].bytes == 4 * 2**20  # of one operator


def test_small_neighbours_at_one_place_are_joined() -> None:
    layers = blocks_of(made())[0]
    norm = next(row for row in layers.rows if row.places == ("norm",))
    assert norm.kinds == ("pow", "mul")
    assert times(norm, layers) == ""


def test_scatters_that_go_on_axis_by_axis_are_one() -> None:
    head = blocks_of(made())[1].rows[0]
    found, small = main_traffic(head)
    assert [(t.phase, t.kind, t.axes) for t in found] == [
        ("forward", "all_gather", ("node", "gpu0", "gpu1")),
        ("backward", "reduce_scatter", ("gpu0", "gpu1")),
    ]
    assert found[1].bytes == 16 * 2**20
    assert small == 1


def test_a_row_of_some_layers_says_of_which() -> None:
    plan = made()
    last = msgspec.structs.replace(plan.operators[11], split={"batch": 4})
    operators = (*plan.operators[:11], last, *plan.operators[12:])
    layers = blocks_of(msgspec.structs.replace(plan, operators=operators))[0]
    adds = [row for row in layers.rows if row.kinds == ("add",)]
    assert [(row.split, times(row, layers)) for row in adds] == [
        ("unsplit", "in 0"),
        ("batch/4", "in 1"),
    ]


def test_what_differs_in_its_layers_is_not_joined() -> None:
    """Query and key are one row where they have the same splits in the same layers."""
    plan = made()
    operators = list(plan.operators)
    for at in (0, 8):  # the query of the first layer, the key of the second
        operators[at] = msgspec.structs.replace(operators[at], split={})
    layers = blocks_of(msgspec.structs.replace(plan, operators=tuple(operators)))[0]
    found = [(label(row), times(row, layers)) for row in layers.rows if "attention." in label(row)]
    assert found == [
        ("attention.query", "in 0"),
        ("attention.key", "in 0"),
        ("attention.query", "in 1"),
        ("attention.key", "in 1"),
    ]


def test_everything_shows_what_is_left_out() -> None:
    assert shown(made()).left_out > 0
    assert shown(made(), everything=True).left_out == 0
    assert main_traffic(blocks_of(made())[1].rows[0], everything=True)[1] == 0
