from __future__ import annotations

import numpy as np
import pytest

from shardfold.search import Problem, repeats, solve
from shardfold.search.exact import folded
from shardfold.search.repeats import find_run


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are looked for in problems of some thousand vertices already."""
    monkeypatch.setattr(repeats, "_MIN_VERTICES", 2_000)


# An encoder layer as the PaSE paper draws it: attention and feed-forward, two residual sums.
LAYER = (
    (0, 1), (0, 7), (1, 2), (2, 3), (2, 5), (3, 4), (4, 5), (5, 6), (6, 7),
    (7, 8), (8, 9), (8, 11), (9, 10), (10, 11), (11, 12),
)  # fmt: skip


def encoder(layers: int, choices: int = 4, seed: int = 0) -> Problem:
    random = np.random.default_rng(seed)
    vectors = [random.random(choices) for _ in range(12)]
    tables = [random.random((choices, choices)) for _ in LAYER]
    edges = tuple((12 * t + u, 12 * t + v) for t in range(layers) for u, v in LAYER)
    costs = tuple(vectors[v % 12] for v in range(12 * layers + 1))
    return Problem(costs, edges, tuple(tables) * layers)


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 20])
def test_layers_fold_to_the_unfolded_cost(layers: int) -> None:
    problem = encoder(layers)
    assert solve(problem).cost == pytest.approx(solve(problem, order="min-fill").cost, rel=1e-12)


def test_tables_grow_with_the_logarithm_of_the_layers() -> None:
    few, many = folded(encoder(16)), folded(encoder(128))
    assert len(many.store.edges) - len(few.store.edges) <= 2 * 3 * 4
    assert not len(many.ids)


def test_a_run_is_found_with_all_its_copies() -> None:
    run = find_run(encoder(400))
    assert run is not None
    assert (run.period, run.copies) == (12, 400)


def test_a_long_run_costs_what_its_layers_cost() -> None:
    problem = encoder(400, choices=3)
    shuffled = np.random.default_rng(0).permutation(len(problem.edges)).tolist()
    edges = tuple(problem.edges[e] for e in shuffled)
    other = Problem(problem.costs, edges, tuple(problem.edge_costs[e] for e in shuffled))
    assert find_run(other) is None
    assert solve(problem).cost == pytest.approx(solve(other).cost, rel=1e-12)
    assert solve(problem).cost == pytest.approx(solve(problem, order="min-fill").cost, rel=1e-12)


def test_an_odd_vertex_in_a_run_is_not_folded_away() -> None:
    problem = encoder(300, choices=3)
    costs = list(problem.costs)
    costs[1801] = costs[1801] + np.array([5.0, -5.0, 5.0])
    other = Problem(tuple(costs), problem.edges, problem.edge_costs)
    solution = solve(other)
    assert solution.cost == pytest.approx(solve(other, order="min-fill").cost, rel=1e-12)
    assert solution.choice[1801] == 1


def test_a_vertex_that_every_layer_reads_is_conditioned_on() -> None:
    layers = 400
    problem = encoder(layers, choices=3)
    random = np.random.default_rng(1)
    mask = len(problem)
    table = random.random((5, 3)) * 3
    edges = problem.edges + tuple((mask, 12 * t + 4) for t in range(layers))
    tables = problem.edge_costs + (table,) * layers
    other = Problem((*problem.costs, random.random(5)), edges, tables)
    solution = solve(other)
    assert solution.is_optimal
    best = min(held_at(other, mask, x, table) for x in range(5))
    assert solution.cost == pytest.approx(best, rel=1e-12)


def held_at(problem: Problem, mask: int, x: int, table: np.ndarray) -> float:
    """The optimum with the mask at x, its rows added to the vertices that read it."""
    costs = [c + table[x] if v % 12 == 4 else c for v, c in enumerate(problem.costs[:mask])]
    kept = [e for e, (u, _) in enumerate(problem.edges) if u != mask]
    edges = tuple(problem.edges[e] for e in kept)
    rest = Problem(tuple(costs), edges, tuple(problem.edge_costs[e] for e in kept))
    return solve(rest).cost + float(problem.costs[mask][x])
