from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from shardfold.search import Problem, solve
from shardfold.search.exact import folded
from shardfold.search.fold_sequential import FEW
from shardfold.search.table_store import Steps

BLOCK = ((0, 1), (1, 2), (0, 2), (2, 3))


def residual(blocks: int, choices: int = 4) -> Problem:
    """Equal blocks in a row, each with a way around its middle vertex."""
    random = np.random.default_rng(0)
    vectors = [random.random(choices) for _ in range(3)]
    tables = tuple(random.random((choices, choices)) for _ in BLOCK)
    edges = tuple((3 * t + u, 3 * t + v) for t in range(blocks) for u, v in BLOCK)
    return Problem(tuple(vectors[v % 3] for v in range(3 * blocks + 1)), edges, tables * blocks)


def test_equal_layers_share_their_tables_whatever_their_number() -> None:
    few, many = folded(residual(10)), folded(residual(150))
    assert len(residual(150)) <= FEW
    assert len(many.store.edges) == len(few.store.edges)


def test_every_vertex_goes_once() -> None:
    problem = residual(7)
    folding = folded(problem)
    (steps,) = [group for group in folding.groups if isinstance(group, Steps)]
    assert sorted(step[0] for step in steps.steps) == list(range(len(problem)))


def test_a_vertex_with_three_neighbours_that_know_each_other_is_left() -> None:
    random = np.random.default_rng(0)
    edges = (*combinations(range(4), 2), (3, 4), (4, 5))
    costs = tuple(random.random(3) for _ in range(6))
    problem = Problem(costs, edges, tuple(random.random((3, 3)) for _ in edges))
    folding = folded(problem)
    assert folding.ids.tolist() == [0, 1, 2, 3]
    assert solve(problem).cost == pytest.approx(solve(problem, method="brute").cost, rel=1e-12)


def test_parallel_edges_either_way_round_are_added_up() -> None:
    random = np.random.default_rng(1)
    edges = ((0, 1), (1, 0), (0, 1), (1, 2))
    costs = tuple(random.random(k) for k in (2, 3, 4))
    tables = tuple(random.random((len(costs[u]), len(costs[v]))) for u, v in edges)
    problem = Problem(costs, edges, tables)
    assert not len(folded(problem).ids)
    assert solve(problem).cost == pytest.approx(solve(problem, method="brute").cost, rel=1e-12)
