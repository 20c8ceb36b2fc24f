from __future__ import annotations

import itertools
from math import isclose

import numpy as np
import pytest

from search_problems import random_problem, renumbered, repeated_problem
from shardfold.errors import InfeasibleError
from shardfold.search import Problem, solve
from shardfold.search import exact as exact_module
from shardfold.search import fold as few_module
from shardfold.search import memory_limit as limited_module
from shardfold.search import repeats as runs_module
from shardfold.search.branch_and_bound import bounded
from shardfold.search.elimination import factors_of, forecast
from shardfold.search.pareto import marginals

ORDERS = ("auto", "generate-seq", "min-degree", "min-fill", "breadth-first")


def cheapest(problem: Problem) -> float:
    """The oracle that anyone can read."""
    every = itertools.product(*(range(size) for size in problem.sizes.tolist()))
    return min(problem.total(choice) for choice in every)


def agree(first: float, second: float) -> bool:
    return isclose(first, second, rel_tol=1e-9, abs_tol=1e-9)


@pytest.fixture(params=["one by one", "rounds"])
def eager_folding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fold and find runs even in the smallest problems, so that small oracles can check it."""
    if request.param == "rounds":
        monkeypatch.setattr(few_module, "FEW", 0)
    monkeypatch.setattr(runs_module, "_MIN_VERTICES", 10)
    monkeypatch.setattr(runs_module, "_MIN_COPIES", 3)


@pytest.mark.parametrize("batch", range(20))
def test_exact_search_agrees_with_brute_force(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one, rounds = few_module.FEW, 0
    for seed in range(100 * batch, 100 * batch + 100):
        problem = random_problem(seed)
        best = solve(problem, method="brute").cost
        for order, few in (("auto", rounds), *((order, one_by_one) for order in ORDERS)):
            monkeypatch.setattr(few_module, "FEW", few)
            solution = solve(problem, order=order)
            assert agree(solution.cost, best), (seed, order, few)
            assert solution.is_optimal
            assert solution.cost == problem.total(solution.choice)


def test_brute_force_agrees_with_itertools() -> None:
    for seed in range(150):
        problem = random_problem(seed, most_vertices=5)
        assert agree(solve(problem, method="brute").cost, cheapest(problem)), seed


@pytest.mark.parametrize("has_hub", [False, True])
def test_folded_equals_unfolded(
    has_hub: bool, eager_folding: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact_module, "_LONG", 4)
    monkeypatch.setattr(exact_module, "_WIDE", 3)
    for seed in range(150):
        problem = repeated_problem(seed, copies=4 + seed % 9, has_hub=has_hub)
        folded, unfolded = solve(problem), solve(problem, order="min-degree")
        assert agree(folded.cost, unfolded.cost), seed
        assert folded.cost == pytest.approx(problem.total(folded.choice), rel=1e-14)


def test_runs_are_found_and_change_nothing(eager_folding: None) -> None:
    found = 0
    for seed in range(200):
        problem = repeated_problem(seed, copies=12)
        found += runs_module.find_run(problem) is not None
        assert agree(solve(problem).cost, solve(problem, order="min-fill").cost), seed
    assert found > 20


def test_numbering_changes_nothing(eager_folding: None) -> None:
    for seed in range(100):
        problem = repeated_problem(seed, copies=6, has_hub=seed % 2 == 0)
        shuffled, new = renumbered(problem, seed)
        solution = solve(shuffled)
        assert agree(solution.cost, solve(problem).cost), seed
        back = [solution.choice[new[v]] for v in range(len(problem))]
        assert agree(problem.total(back), solution.cost)


def test_another_choice_never_makes_it_dearer() -> None:
    for seed in range(100):
        problem = random_problem(seed)
        if not len(problem):
            continue
        random = np.random.default_rng(seed)
        costs = (np.append(problem.costs[0], random.normal()), *problem.costs[1:])
        tables = []
        for (u, v), table in zip(problem.edges, problem.edge_costs, strict=True):
            if u == 0:
                table = np.vstack([table, random.normal(size=(1, table.shape[1]))])
            if v == 0:
                table = np.hstack([table, random.normal(size=(table.shape[0], 1))])
            tables.append(table)
        larger = Problem(costs, problem.edges, tuple(tables))
        assert solve(larger).cost <= solve(problem).cost + 1e-9


def test_the_same_problem_gives_the_same_choice() -> None:
    for seed in range(50):
        assert solve(random_problem(seed)).choice == solve(random_problem(seed)).choice


def test_bounds_alone_prove_the_optimum_of_small_problems() -> None:
    for seed in range(200):
        problem = random_problem(seed)
        answer = bounded(factors_of(problem), table_bytes=0)
        assert answer.lower_bound is None, seed
        assert agree(problem.total(answer.choice), solve(problem, method="brute").cost), seed


def test_marginals_are_the_best_costs_with_one_vertex_held() -> None:
    for seed in range(60):
        problem = random_problem(seed, most_vertices=5)
        factors = factors_of(problem)
        found = marginals(factors, forecast(factors, "min-fill").order)
        every = list(itertools.product(*(range(size) for size in problem.sizes.tolist())))
        for v, size in enumerate(problem.sizes.tolist()):
            for x in range(size):
                held = min(problem.total(choice) for choice in every if choice[v] == x)
                assert agree(float(found.best[v][x]), held), (seed, v, x)


@pytest.mark.parametrize("batch", range(4))
def test_memory_limit_agrees_with_brute_force(batch: int) -> None:
    for seed in range(60 * batch, 60 * batch + 60):
        problem = random_problem(seed, with_bytes=True)
        least = solve(problem.blended(0.0, 1.0)).cost
        most = problem.total_bytes(solve(problem).choice)
        for part in (0.0, 0.25, 0.5, 0.75, 1.0):
            limit = least + part * (most - least) + 0.25
            best = solve(problem, method="brute", memory_limit=limit).cost
            solution = solve(problem, memory_limit=limit)
            assert solution.bytes is not None
            assert solution.bytes <= limit
            assert solution.lower_bound <= best + 1e-9, seed
            assert agree(solution.cost, best) or not solution.is_optimal, seed
            assert solution.cost <= best * (1 + 0.005) + 1e-9 or best < 0, seed


def test_what_is_known_before_only_saves_time() -> None:
    cut = 0
    for seed in range(120):
        problem = random_problem(seed, with_bytes=True)
        fastest = solve(problem)
        least, most = solve(problem.blended(0.0, 1.0)).cost, problem.total_bytes(fastest.choice)
        limit = (least + most) / 2
        best = solve(problem, memory_limit=limit)
        again = solve(problem, memory_limit=limit, fastest=fastest, cutoff=best.cost + 1e-6)
        assert again.choice == best.choice, seed
        early = solve(problem, memory_limit=limit, fastest=fastest, cutoff=fastest.cost)
        assert early.bytes is not None
        assert early.bytes <= limit, seed
        assert early.lower_bound <= best.cost + 1e-9 <= early.cost + 2e-9, seed
        cut += not early.is_optimal
    assert cut > 5


def test_gaps_that_are_not_closed_are_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_module, "_SMALL", -1.0)
    monkeypatch.setattr(limited_module, "_LARGE", -1.0)
    open_gaps = 0
    for seed in range(120):
        problem = random_problem(seed, with_bytes=True)
        least = solve(problem.blended(0.0, 1.0)).cost
        limit = (least + problem.total_bytes(solve(problem).choice)) / 2
        best = solve(problem, method="brute", memory_limit=limit).cost
        solution = solve(problem, memory_limit=limit)
        assert solution.lower_bound <= best + 1e-9 <= solution.cost + 2e-9, seed
        open_gaps += not solution.is_optimal
    assert open_gaps > 10


def test_a_limit_below_the_smallest_says_how_much_is_needed() -> None:
    for seed in range(40):
        problem = random_problem(seed, with_bytes=True)
        least = solve(problem.blended(0.0, 1.0)).cost
        with pytest.raises(InfeasibleError, match="smallest needs") as error:
            solve(problem, memory_limit=least - 1)
        assert error.value.needed_bytes == pytest.approx(least)
