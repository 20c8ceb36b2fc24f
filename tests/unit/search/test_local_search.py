"""Single moves: they end where no vertex alone can do better, never go up, and keep to a limit."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from draws import draws
from shardfold.search import Problem
from shardfold.search.interning import Array
from shardfold.search.local_search import descend


def some_problem(random: np.random.Generator, vertices: int) -> Problem:
    sizes = random.integers(1, 5, vertices)
    pairs = [(u, v) for u in range(vertices) for v in range(vertices) if u != v]
    edges = tuple(pair for pair in pairs if random.random() < 0.3)

    def tables() -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        own = tuple(random.integers(0, 9, n).astype(float) for n in sizes)
        between = (random.integers(0, 9, (sizes[u], sizes[v])).astype(float) for u, v in edges)
        return own, tuple(between)

    (costs, edge_costs), (sizes_bytes, edge_bytes) = tables(), tables()
    return Problem(costs, edges, edge_costs, sizes_bytes, edge_bytes)


@draws(60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 7))
def test_no_vertex_alone_can_lower_the_sum_any_more(seed: int, vertices: int) -> None:
    random = np.random.default_rng(seed)
    problem = some_problem(random, vertices)
    start = random.integers(problem.sizes)
    found = descend(problem, start, passes=99)
    assert problem.total(found) <= problem.total(start)
    for vertex, size in enumerate(problem.sizes):
        for other in range(size):
            moved = found.copy()
            moved[vertex] = other
            assert problem.total(moved) >= problem.total(found)


@draws(60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.integers(0, 9))
def test_descending_keeps_to_the_limit_and_never_costs_more(
    seed: int, vertices: int, room: int
) -> None:
    random = np.random.default_rng(seed)
    problem = some_problem(random, vertices)
    start = random.integers(problem.sizes)
    limit = problem.total_bytes(start) + room
    found = descend(problem, start, limit)
    assert problem.total_bytes(found) <= limit
    assert problem.total(found) <= problem.total(start)
