from __future__ import annotations

from math import isclose

from shardfold.report.plan_table import blocks_of, label, main_traffic, shown, times

from ..plans.made import made


def test_repeats_are_one_block_and_wrappers_go_unnamed() -> None:
    layers, rest = blocks_of(made())
    assert (layers.name, layers.repeats) == ("layers.*", 2)
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
    query = blocks_of(made())[0].rows[0]
    assert label(query) == "attention.query, key"
    assert query.count == 4
    assert times(query, 2) == ""
    assert isclose(query.traffic[0].seconds, 4 * 0.02)
    assert query.traffic[0].bytes == 4 * 2**20  # of one operator


def test_small_neighbours_at_one_place_are_joined() -> None:
    norm = next(row for row in blocks_of(made())[0].rows if row.places == ("norm",))
    assert norm.kinds == ("pow", "mul")
    assert times(norm, 2) == ""


def test_scatters_that_go_on_axis_by_axis_are_one() -> None:
    head = blocks_of(made())[1].rows[0]
    found, small = main_traffic(head)
    assert [(t.phase, t.kind, t.axes) for t in found] == [
        ("fwd", "gather", ("node", "gpu0", "gpu1")),
        ("bwd", "scatter", ("gpu0", "gpu1")),
    ]
    assert found[1].bytes == 16 * 2**20
    assert small == 1


def test_everything_shows_what_is_left_out() -> None:
    assert shown(made()).left_out > 0
    assert shown(made(), everything=True).left_out == 0
    assert main_traffic(blocks_of(made())[1].rows[0], everything=True)[1] == 0
