from __future__ import annotations

import numpy as np
import pytest

from shardfold.errors import InfeasibleError, InputError, ProblemError
from shardfold.search import METHODS, Problem, solve
from shardfold.search.baselines import mcmc


def chain(vertices: int, choices: int, seed: int, with_bytes: bool = False) -> Problem:
    random = np.random.default_rng(seed)
    edges = (*((v, v + 1) for v in range(vertices - 1)), (0, vertices - 1))
    costs = tuple(random.random(choices) for _ in range(vertices))
    tables = tuple(random.random((choices, choices)) for _ in edges)
    sizes = tuple(random.random(choices) for _ in range(vertices)) if with_bytes else None
    return Problem(costs, edges, tables, sizes)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("vertices", [0, 1, 2, 6])
def test_every_method_returns_a_legal_choice_no_cheaper_than_the_optimum(
    method: str, vertices: int
) -> None:
    problem = chain(vertices, 4, seed=1) if vertices > 2 else Problem((np.ones(3),) * vertices)
    best, solution = solve(problem), solve(problem, method=method)
    assert solution.cost == problem.total(solution.choice)
    assert solution.cost >= best.cost - 1e-12
    assert solution.statistics.method == method
    if method in ("exact", "brute", "breadth-first", "ilp"):
        assert solution.is_optimal
        assert solution.cost == pytest.approx(best.cost)
    elif solution.cost != 0:
        assert not solution.is_optimal
        assert solution.lower_bound == -np.inf


@pytest.mark.parametrize("seed", range(6))
def test_the_integer_program_agrees(seed: int) -> None:
    problem = chain(30 + 5 * seed, 4, seed)
    program = solve(problem, method="ilp")
    assert program.is_optimal
    assert program.cost == pytest.approx(solve(problem).cost, rel=1e-9)


@pytest.mark.parametrize("part", [0.25, 0.5, 0.75])
def test_the_integer_program_agrees_under_a_memory_limit(part: float) -> None:
    problem = chain(30, 5, seed=0, with_bytes=True)
    least = solve(problem.blended(0.0, 1.0)).cost
    most = problem.total_bytes(solve(problem).choice)
    limit = least + part * (most - least)
    program, solution = (solve(problem, method=m, memory_limit=limit) for m in ("ilp", "exact"))
    assert solution.cost <= program.cost * 1.005
    assert solution.lower_bound <= program.cost * (1 + 1e-9)
    assert solution.bytes is not None
    assert solution.bytes <= limit


def test_many_identical_layers_may_be_mixed_under_a_limit() -> None:
    """One weight moves all layers at once; only a mix of both choices is near the optimum."""
    layers = 200
    costs, sizes = np.array([1.0, 2.0]), np.array([2.0, 1.0])
    move = np.array([[0.0, 0.01], [0.01, 0.0]])
    edges = tuple((v, v + 1) for v in range(layers - 1))
    problem = Problem((costs,) * layers, edges, (move,) * (layers - 1), (sizes,) * layers)
    solution = solve(problem, memory_limit=1.5 * layers)
    assert solution.cost == pytest.approx(1.5 * layers + 0.01)
    assert solution.is_optimal or solution.gap < 1e-4


def test_random_moves_improve_what_they_start_from() -> None:
    problem = chain(20, 5, seed=2)
    start = [0] * 20
    answer = mcmc(problem, start=start, moves=20_000)
    assert problem.total(answer.choice) < problem.total(start)
    assert problem.total(answer.choice) < 1.2 * solve(problem).cost


def test_a_generous_limit_changes_nothing() -> None:
    problem = chain(8, 4, seed=0, with_bytes=True)
    assert solve(problem, memory_limit=1e9).choice == solve(problem).choice


@pytest.mark.parametrize("method", ["exact", "brute", "ilp"])
def test_a_limit_that_nothing_fits_says_what_is_needed(method: str) -> None:
    problem = chain(6, 3, seed=0, with_bytes=True)
    least = solve(problem.blended(0.0, 1.0)).cost
    with pytest.raises(InfeasibleError) as error:
        solve(problem, method=method, memory_limit=least * 0.9)
    assert error.value.needed_bytes == pytest.approx(least)


def test_wrong_requests_are_refused() -> None:
    problem = chain(5, 3, seed=0)
    with pytest.raises(InputError, match="Did you mean exact"):
        solve(problem, method="exakt")
    with pytest.raises(InputError, match="Did you mean min-fill"):
        solve(problem, order="minfill")
    with pytest.raises(InputError, match="knows no memory limit"):
        solve(problem, method="greedy", memory_limit=1.0)
    with pytest.raises(ProblemError, match="choices carry bytes"):
        solve(problem, memory_limit=1.0)
    with pytest.raises(InputError, match="combinations"):
        solve(chain(60, 4, seed=0), method="brute")
    sides = tuple((0, v) for v in range(1, 12))
    star = Problem((np.zeros(9),) * 12, sides, (np.zeros((9, 9)),) * 11)
    with pytest.raises(InputError, match="Breadth-first tables need"):
        solve(star, method="breadth-first")


def test_progress_is_reported() -> None:
    seen = []
    solve(chain(8, 3, seed=0), order="min-fill", watch=seen.append)
    assert [progress.done for progress in seen] == list(range(1, 9))
    assert {progress.total for progress in seen} == {8}
