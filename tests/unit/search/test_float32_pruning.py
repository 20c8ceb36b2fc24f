from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from shardfold.search import Problem, float32_pruning, repeats, solve

SHAPES = {
    "chain": ((0, 1), (1, 2), (2, 3), (3, 4)),
    "ring": ((0, 1), (1, 2), (2, 3), (3, 4), (4, 0)),
    "branches": ((0, 1), (0, 2), (1, 3), (2, 3), (0, 3), (3, 4)),
    "parallel edges": ((0, 1), (1, 0), (1, 2), (2, 3), (1, 3), (3, 4), (1, 4)),
    "parts": ((0, 1), (2, 3)),
}


@pytest.fixture(autouse=True)
def every_problem_is_heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float32_pruning, "_HEAVY", 0.0)
    monkeypatch.setattr(float32_pruning, "_VARIED", 0)


def made(shape: str, seed: int) -> Problem:
    """Random costs between -1 and 1, 5 choices a vertex."""
    random, edges = np.random.default_rng(seed), SHAPES[shape]
    costs = tuple(random.uniform(-1, 1, 5) for _ in range(5))
    return Problem(costs, edges, tuple(random.uniform(-1, 1, (5, 5)) for _ in edges))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(10))
def test_the_best_choice_is_kept_and_found(shape: str, seed: int) -> None:
    problem = made(shape, seed)
    small = float32_pruning.narrowed(problem)
    assert small is not None
    assert small.problem.sizes.sum() < problem.sizes.sum() / 3
    found, best = solve(problem), solve(problem, method="brute")
    assert found.is_optimal
    assert found.cost == pytest.approx(best.cost, rel=1e-12)
    assert found.cost == pytest.approx(problem.total(found.choice), rel=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(10))
def test_what_single_precision_cannot_tell_apart_is_told_apart(shape: str, seed: int) -> None:
    """Costs of size 1 are moved between vertices and edges, and all sums differ by 1e-9 only."""
    random = np.random.default_rng(seed)
    costs, tables = [1e-9 * random.random(4) for _ in range(5)], []
    for u, v in SHAPES[shape]:
        at_u, at_v = random.random(4), random.random(4)
        costs[u], costs[v] = costs[u] + at_u, costs[v] + at_v
        tables.append(-at_u[:, None] - at_v)
    problem = Problem(tuple(costs), SHAPES[shape], tuple(tables))
    found, best = solve(problem), solve(problem, method="brute")
    assert found.cost == pytest.approx(best.cost, rel=1e-4, abs=1e-14)


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e27])
def test_the_least_and_the_largest_costs(scale: float) -> None:
    given = made("branches", 3)
    problem = Problem(
        tuple(scale * cost for cost in given.costs),
        given.edges,
        tuple(scale * table for table in given.edge_costs),
    )
    assert float32_pruning.narrowed(problem) is not None
    assert solve(problem).choice == solve(given, method="brute").choice


def test_costs_beyond_single_precision_are_left_to_double() -> None:
    given = made("branches", 3)
    costs = tuple(1e40 * cost for cost in given.costs)
    problem = Problem(costs, given.edges, given.edge_costs)
    assert float32_pruning.narrowed(problem) is None
    assert solve(problem).choice == solve(problem, method="brute").choice


def test_equal_vertices_that_keep_the_same_share_their_tables() -> None:
    random = np.random.default_rng(0)
    hub, spoke, table = random.random(6), random.random(6), random.random((6, 6))
    problem = Problem((hub, *[spoke] * 4), tuple((0, v) for v in range(1, 5)), (table,) * 4)
    small = float32_pruning.narrowed(problem)
    assert small is not None
    assert len(small.problem.vertex_kinds.tables) == 2
    assert len(small.problem.edge_kinds.tables) == 1


def test_a_vertex_with_too_many_sums_keeps_all_its_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float32_pruning, "_MANY", 0)
    problem = made("branches", 0)
    small = float32_pruning.narrowed(problem)
    assert small is not None
    assert sorted(small.problem.sizes)[1:] == [5, 5, 5, 5]
    assert solve(problem).cost == pytest.approx(solve(problem, method="brute").cost, rel=1e-12)


def test_what_does_not_fold_away_is_not_searched_roughly() -> None:
    random = np.random.default_rng(0)
    edges = tuple(combinations(range(4), 2))
    tables = tuple(random.random((3, 3)) for _ in edges)
    assert float32_pruning.narrowed(Problem((np.ones(3),) * 4, edges, tables)) is None


def test_light_problems_are_not_searched_roughly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float32_pruning, "_HEAVY", 5 * 25**1.5 + 1)
    assert float32_pruning.narrowed(made("ring", 0)) is None
    monkeypatch.setattr(float32_pruning, "_HEAVY", 5 * 25**1.5 - 1)
    assert float32_pruning.narrowed(made("ring", 0)) is not None


def test_a_few_tables_over_and_over_are_not_searched_roughly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(float32_pruning, "_VARIED", 5)
    assert float32_pruning.narrowed(made("ring", 0)) is not None
    monkeypatch.setattr(float32_pruning, "_VARIED", 6)
    assert float32_pruning.narrowed(made("ring", 0)) is None


def test_a_run_of_equal_blocks_is_not_searched_roughly(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    vector, table = random.random(3), random.random((3, 3))
    edges = tuple((v, v + 1) for v in range(99))
    problem = Problem((vector,) * 100, edges, (table,) * 99)
    assert float32_pruning.narrowed(problem) is not None
    monkeypatch.setattr(repeats, "_MIN_VERTICES", 20)
    assert float32_pruning.narrowed(problem) is None
