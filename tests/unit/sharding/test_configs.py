"""Every legal configuration is there, no illegal one is, and layouts follow from the algebra."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draws import draws
from shardfold.cluster import Mesh
from shardfold.cluster.mesh import Axis
from shardfold.graph import Graph
from shardfold.operators import rules_of
from shardfold.sharding import Space, find_subdims, space_of
from shardfold.sharding.configs import NONE, PASS, is_legal_split, leaves_no_part_empty
from shardfold.sharding.layouts import PENDING, REPLICATED, SHARED
from virtual.movement import chunks
from virtual.sketch import Sketch


def mesh(*sizes: int) -> Mesh:
    return Mesh(tuple(Axis(f"x{i}", size, 0) for i, size in enumerate(sizes)))


def spaces(graph: Graph, on: Mesh) -> list[Space]:
    return [space_of(rule, on) for rule in find_subdims(graph, rules_of(graph)).rules]


def linear(b: int = 8, m: int = 6, n: int = 10) -> Graph:
    sketch = Sketch()
    y = sketch.linear(sketch.input(b, m), sketch.parameter(n, m), sketch.parameter(n))
    return sketch.graph(y)


@given(st.integers(1, 300), st.integers(2, 16))
def test_a_legal_split_leaves_no_part_empty_and_is_nearly_even(size: int, parts: int) -> None:
    lengths = [high - low for low, high in chunks(size, parts)]
    expected = min(lengths) > 0 and max(lengths) * parts <= 1.25 * size
    assert is_legal_split(size, parts) == expected


@given(st.lists(st.integers(2, 4), min_size=1, max_size=3), st.data())
@draws(60)
def test_configurations_are_all_that_are_legal(sizes: list[int], data: st.DataObject) -> None:
    on = mesh(*sizes)
    b, m, n = (data.draw(st.integers(1, 24)) for _ in range(3))
    (space,) = spaces(linear(b, m, n), on)
    wanted = set()
    for row in product((None, "i0", "m", "n"), repeat=len(sizes)):
        parts = {f: prod(s for s, g in zip(sizes, row, strict=True) if g == f) for f in row}
        parts.pop(None, None)
        lengths = {"i0": b, "m": m, "n": n}
        if all(lengths[f] > 1 and is_legal_split(lengths[f], k) for f, k in parts.items()):
            wanted.add(row)
    names = {NONE: None} | dict(enumerate(space.rule.factors))
    found = [tuple(names[f] for f in row) for row in space.configs.tolist()]
    assert len(found) == len(set(found))
    assert set(found) == wanted


def states(space: Space, factor: str) -> tuple[list[int], list[int]]:
    """Operand and result states where the only axis splits `factor`."""
    at = space.configs[:, 0].tolist().index(space.rule.factors.index(factor))
    operands = [int(space.operand_layouts(k)[at, 0]) for k in range(len(space.rule.operands))]
    return operands, [int(space.result_layouts(k)[at, 0]) for k in range(len(space.rule.results))]


def test_the_three_splits_of_a_linear_layer() -> None:
    (space,) = spaces(linear(), mesh(2))
    assert states(space, "i0") == ([0, SHARED, SHARED], [0])  # data parallel
    assert states(space, "n") == ([SHARED, 0, 0], [1])  # column parallel
    assert states(space, "m") == ([1, 1, SHARED], [PENDING])  # row parallel


def test_an_unsplit_axis_replicates_everything() -> None:
    (space,) = spaces(linear(), mesh(2))
    at = space.configs[:, 0].tolist().index(NONE)
    assert [int(space.operand_layouts(k)[at, 0]) for k in range(3)] == [REPLICATED] * 3
    assert int(space.result_layouts(0)[at, 0]) == REPLICATED


def test_a_pending_sum_passes_through_a_sum_but_not_through_a_relu() -> None:
    sketch = Sketch()
    a, b = sketch.parameter(8, 6), sketch.parameter(8, 6)
    y = sketch.relu(sketch.add(a, b))
    add, relu = spaces(sketch.graph(y), mesh(2))
    at = add.configs[:, 0].tolist().index(PASS)
    assert [int(add.operand_layouts(k)[at, 0]) for k in (0, 1)] == [PENDING, PENDING]
    assert int(add.result_layouts(0)[at, 0]) == PENDING
    assert PASS not in relu.configs


def test_a_resolved_factor_leaves_a_complete_result() -> None:
    sketch = Sketch()
    loss = sketch.cross_entropy(sketch.parameter(8, 12), sketch.input(8, dtype="int64"))
    (space,) = spaces(sketch.graph(loss), mesh(2))
    assert states(space, "c") == ([1, SHARED], [REPLICATED])
    assert states(space, "b") == ([0, 0], [PENDING])


def test_parts_multiply_over_the_axes_of_a_factor() -> None:
    (space,) = spaces(linear(), mesh(2, 2))
    row = [space.rule.factors.index("i0")] * 2
    at = space.configs.tolist().index(row)
    assert space.parts((2, 2))[at].tolist() == [4, 1, 1]


def attention() -> Graph:
    sketch = Sketch()
    operands = {name: sketch.input(4, 4, 8, 4) for name in ("query", "key", "value")}
    y = sketch.op("scaled_dot_product_attention", operands, (4, 4, 8, 4), is_causal=True)
    return sketch.graph(y)


@pytest.mark.parametrize("graph", [linear(), attention()])
@pytest.mark.parametrize("sizes", [(2,), (2, 2), (4, 2)])
def test_what_is_offered_can_be_run(graph: Graph, sizes: tuple[int, ...]) -> None:
    """Factors that are split together with others, too: `ring` is queries and keys."""
    on = mesh(*sizes)
    for space in spaces(graph, on):
        assert all(leaves_no_part_empty(space.rule, row, on) for row in space.configs.tolist())


def test_what_cannot_be_split_by_itself_cannot_be_run() -> None:
    """Keys stay whole but where queries are split with them."""
    (space,) = spaces(attention(), mesh(2))
    can = {f: leaves_no_part_empty(space.rule, [i], mesh(2)) for i, f in enumerate("bhqdkec")}
    assert can == dict.fromkeys("bhqc", True) | dict.fromkeys("dke", False)


def test_one_device_has_one_configuration() -> None:
    (space,) = spaces(linear(), Mesh(()))
    assert space.configs.shape == (1, 0)


@pytest.mark.parametrize(
    ("size", "parts", "legal"), [(50257, 8, True), (5, 4, False), (3, 2, False)]
)
def test_uneven_sizes(size: int, parts: int, legal: bool) -> None:
    assert is_legal_split(size, parts) == legal
    (space,) = spaces(linear(b=1, m=1, n=size), mesh(parts))
    assert np.any(space.configs >= 0) == legal


@pytest.mark.parametrize(("rows", "legal"), [(8, True), (10, False)])
def test_a_strided_factor_is_split_only_evenly(rows: int, legal: bool) -> None:
    """5 output rows in two parts are 3 and 2; 10 input rows would be 5 and 5, not 6 and 4."""
    sketch = Sketch()
    shape = (1, 4, rows // 2, 1)
    y = sketch.op(
        "conv2d",
        {"input": sketch.input(1, 4, rows, 2), "weight": sketch.parameter(4, 4, 2, 2)},
        shape,
        stride=(2, 2),
        padding=(0, 0),
        dilation=(1, 1),
        groups=1,
    )
    (space,) = spaces(sketch.graph(y), mesh(2))
    factor = space.rule.factors.index("h")
    assert (factor in space.configs) == legal
