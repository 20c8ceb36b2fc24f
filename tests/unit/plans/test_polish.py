"""Small steps from a choice: they end where no vertex alone can do better, and never go up."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

import shardfold as sf
from shardfold import zoo
from shardfold.plans.polish import descended
from shardfold.search import Problem


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 7))
def test_no_vertex_alone_can_lower_the_sum_any_more(seed: int, vertices: int) -> None:
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 5, vertices)
    pairs = [(u, v) for u in range(vertices) for v in range(u + 1, vertices)]
    ends = [pair for pair in pairs if random.random() < 0.5]
    problem = Problem(
        costs=tuple(random.integers(0, 9, n).astype(float) for n in sizes),
        edges=tuple(ends),
        edge_costs=tuple(
            random.integers(0, 9, (sizes[u], sizes[v])).astype(float) for u, v in ends
        ),
    )
    start = tuple(int(random.integers(n)) for n in sizes)
    found = descended(problem, start)
    assert problem.total(found) <= problem.total(start)
    for vertex, size in enumerate(sizes):
        for other in range(size):
            moved = (*found[:vertex], other, *found[vertex + 1 :])
            assert problem.total(moved) >= problem.total(found)


def test_the_plan_is_no_slower_than_an_equal_sum_of_another_search() -> None:
    module, args, kwargs = zoo.build("alexnet")
    found = sf.compare(
        module, args, kwargs, cluster="8x8xh100", dtype="bf16", methods=["plan", "exact", "ilp"]
    )
    steps = {r.method: r.simulated_seconds for r in found.results}
    assert steps["plan"] is not None
    assert all(step is not None and step >= steps["plan"] for step in steps.values())
