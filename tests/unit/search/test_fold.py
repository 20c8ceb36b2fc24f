from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from shardfold.search import Problem, repeats, solve
from shardfold.search.exact import folded
from shardfold.search.fold import FEW
from shardfold.search.repeats import find_run
from shardfold.search.table_store import Steps


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
