from __future__ import annotations

import time

import numpy as np
import pytest

from shardfold.search import Problem, solve
from shardfold.search.branch_and_bound import Dual, bounded
from shardfold.search.elimination import Pairwise, factors_of


def clique(vertices: int, choices: int, seed: int, layouts: int = 0) -> Problem:
    """Every vertex reads every other, as in a dense block; few layouts, or any cost at all."""
    random = np.random.default_rng(seed)
    layout = [random.integers(0, max(layouts, 1), choices) for _ in range(vertices)]
    costs = tuple(random.random(choices) * 3 for _ in range(vertices))
    edges = tuple((u, v) for u in range(vertices) for v in range(u + 1, vertices))

    def table(u: int, v: int) -> np.ndarray:
        if not layouts:
            return random.random((choices, choices))
        moved = random.random((layouts, layouts))[layout[u]][:, layout[v]]
        return moved * (layout[u][:, None] != layout[v])

    return Problem(costs, edges, tuple(table(u, v) for u, v in edges))


def test_a_dense_block_is_proven_without_its_table() -> None:
    problem = clique(24, 40, seed=0, layouts=6)
    solution = solve(problem)
    assert solution.is_optimal
    assert solution.lower_bound == pytest.approx(solution.cost)


@pytest.mark.parametrize("seed", range(5))
def test_hard_small_cliques_agree_with_brute_force(seed: int) -> None:
    problem = clique(7, 5, seed)
    solution = solve(problem, table_bytes=100)
    assert solution.cost == pytest.approx(solve(problem, method="brute").cost)
    assert solution.is_optimal


def test_running_out_of_time_states_the_gap() -> None:
    problem = clique(16, 16, seed=0)
    begin = time.process_time()
    answer = bounded(factors_of(problem), table_bytes=1e6, seconds=1.0)
    assert time.process_time() - begin < 5
    assert answer.lower_bound is not None
    assert 0 < answer.lower_bound < problem.total(answer.choice)


def test_without_time_there_is_still_a_choice_and_a_bound() -> None:
    problem = clique(60, 30, seed=0)
    begin = time.process_time()
    answer = bounded(factors_of(problem), table_bytes=1e6, seconds=0.0)
    assert time.process_time() - begin < 2  # one sweep, and no part is made for each choice
    assert answer.lower_bound is not None
    assert 0 < answer.lower_bound < problem.total(answer.choice)


def test_the_dual_bound_never_exceeds_the_optimum_and_strikes_no_optimal_choice() -> None:
    for seed in range(20):
        problem = clique(6, 4, seed)
        best = solve(problem, method="brute")
        dual = Dual(Pairwise.of(factors_of(problem)))
        for _ in range(10):
            dual.sweep()
            bound, rises = dual.bound()
            assert bound <= best.cost + 1e-9
            for vertex, x in enumerate(best.choice):
                assert bound + rises[vertex][x] <= best.cost + 1e-9
            assert problem.total(dual.rounded()) >= best.cost - 1e-9


def test_the_dual_bound_of_a_tree_is_its_optimum() -> None:
    random = np.random.default_rng(0)
    edges = tuple((int(random.integers(v)), v) for v in range(1, 30))
    tables = tuple(random.random((6, 6)) for _ in edges)
    problem = Problem(tuple(random.random(6) for _ in range(30)), edges, tables)
    dual = Dual(Pairwise.of(factors_of(problem)))
    for _ in range(40):
        dual.sweep()
    assert dual.bound()[0] == pytest.approx(solve(problem).cost, rel=1e-6)


@pytest.mark.parametrize("order", ["auto", "min-fill"])
def test_a_small_table_limit_changes_the_way_not_the_answer(order: str) -> None:
    problem = clique(10, 8, seed=3, layouts=4)
    large = solve(problem, order=order)
    small = solve(problem, order=order, table_bytes=1_000)
    assert small.cost == pytest.approx(large.cost)
    assert small.is_optimal


@pytest.mark.parametrize("order", ["auto", "min-fill"])
def test_any_number_of_single_choices_fits_into_arrays(order: str) -> None:
    """Arrays have at most 64 axes; vertices with one choice must not use them up."""
    random = np.random.default_rng(0)
    ones, few = range(90), (90, 91, 92)
    edges = [(u, v) for u in ones for v in few] + [(90, 91), (91, 92), (90, 92)]
    sizes = [1] * 90 + [3, 3, 3]
    tables = tuple(random.random((sizes[u], sizes[v])) for u, v in edges)
    problem = Problem(tuple(random.random(size) for size in sizes), tuple(edges), tables)
    assert solve(problem, order=order).cost == pytest.approx(solve(problem, method="brute").cost)


def test_a_wide_random_graph_is_closed_by_bounds() -> None:
    random = np.random.default_rng(0)
    edges = {tuple(sorted(pair)) for pair in random.integers(0, 100, (150, 2)).tolist()}
    edges = tuple((u, v) for u, v in sorted(edges) if u != v)
    tables = tuple(random.random((4, 4)) for _ in edges)
    problem = Problem(tuple(random.random(4) for _ in range(100)), edges, tables)
    solution = solve(problem)
    assert solution.is_optimal
    assert solution.cost == pytest.approx(solve(problem, method="ilp").cost)


def test_time_given_is_about_time_taken_with_a_memory_limit_too() -> None:
    hard = clique(14, 14, seed=0)
    sizes = tuple(np.random.default_rng(1).random(14) for _ in range(14))
    problem = Problem(hard.costs, hard.edges, hard.edge_costs, sizes)
    begin = time.process_time()
    solution = solve(problem, memory_limit=5.0, table_bytes=1e5, seconds=0.3)
    assert time.process_time() - begin < 6
    assert not solution.is_optimal
    assert solution.bytes is not None
    assert solution.bytes <= 5.0
    assert 0 < solution.gap < 1


def test_a_part_shares_the_tables_of_which_it_has_every_choice() -> None:
    """Or a search with many open parts takes as many times the memory of the problem."""
    whole = Pairwise.of(factors_of(clique(6, 4, seed=0)))
    kept = [np.arange(4) for _ in whole.unary]
    kept[2] = np.array([1])
    part = whole.restricted(kept)
    for pair, table, before in zip(whole.pairs, part.tables, whole.tables, strict=True):
        assert np.shares_memory(table, before) == (2 not in pair)
