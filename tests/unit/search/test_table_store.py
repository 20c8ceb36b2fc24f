from __future__ import annotations

import numpy as np

from shardfold.search.table_store import Store

random = np.random.default_rng(0)


def store(choices: int = 3) -> Store:
    vertices = [random.random(choices) for _ in range(2)]
    return Store(vertices, [random.random((choices, choices)) for _ in range(3)])


def test_turning_an_edge_around_is_its_transpose() -> None:
    tables = store()
    for edge in (0, 2, 4):
        assert np.array_equal(tables.edges[edge ^ 1], tables.edges[edge].T)


def test_a_bridge_is_computed_once_whichever_way_it_is_crossed() -> None:
    tables = store()
    there = tables.bridge(0, 0, 3)
    count = len(tables.edges)
    assert tables.bridge(0, 3, 0) == there ^ 1
    assert tables.bridge(0, 0, 3) == there
    assert len(tables.edges) == count
    joint = tables.vertices[0][:, None, None] + tables.edges[0][:, :, None]
    expected = (joint + tables.edges[3][:, None, :]).min(axis=0)
    assert np.allclose(tables.edges[there], expected, rtol=1e-15)


def test_sums_do_not_depend_on_order_or_side() -> None:
    tables = store()
    total = tables.add_edges(0, 3)
    assert tables.add_edges(3, 0) == total
    assert tables.add_edges(1, 2) == total ^ 1
    assert np.array_equal(tables.edges[total], tables.edges[0] + tables.edges[3])


def test_choices_that_make_no_difference_are_merged_exactly() -> None:
    choices = 80
    layout = random.integers(0, 5, choices)
    moving = random.random((5, choices))[layout]
    tables = Store([random.random(choices)], [moving, moving[::-1].copy()])
    bridge = tables.bridge(0, 0, 2)
    joint = tables.vertices[0][:, None, None] + tables.edges[0][:, :, None]
    expected = (joint + tables.edges[2][:, None, :]).min(axis=0)
    assert np.allclose(tables.edges[bridge], expected, rtol=1e-14)
    assert tables.alike(0) is not None


def test_conditioning_moves_an_end_of_an_edge_to_the_front() -> None:
    tables = store()
    given = tables.vertices[tables.condition(0)]
    assert np.array_equal(given, tables.edges[0].T)
