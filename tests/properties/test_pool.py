"""A problem with few choices: its totals are those of the whole, and what is taken is kept."""

from __future__ import annotations

import numpy as np
import pytest

from search_problems import random_problem
from shardfold.search import Problem, solve
from shardfold.search import memory_limit as limited_module
from shardfold.search.memory_limit import Pool


def draws(problem: Problem, count: int, seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, problem.sizes) for _ in range(count)]


@pytest.mark.parametrize("seed", range(40))
def test_totals_are_those_of_the_whole(seed: int) -> None:
    problem = random_problem(seed, with_bytes=True)
    pool = Pool.of_none(problem)
    for choice in draws(problem, 2, seed):
        pool.add(choice)
    narrow, kept = pool.narrowed()
    for choice in draws(narrow, 5, seed):
        whole = pool.widened(choice, kept)
        assert narrow.total(choice) == pytest.approx(problem.total(whole))
        assert narrow.total_bytes(choice) == pytest.approx(problem.total_bytes(whole))


@pytest.mark.parametrize("seed", range(40))
def test_the_best_of_a_pool_is_no_worse_than_what_was_put_into_it(seed: int) -> None:
    problem = random_problem(seed)
    pool, choices = Pool.of_none(problem), draws(problem, 3, seed)
    for choice in choices:
        pool.add(choice)
    narrow, kept = pool.narrowed()
    best = pool.widened(np.array(solve(narrow).choice, dtype=np.int64), kept)
    assert problem.total(best) <= min(problem.total(c) for c in choices) + 1e-9


def test_vertices_with_the_same_tables_share_their_choices() -> None:
    table, move = np.array([3.0, 2.0, 1.0]), np.ones((3, 3))
    problem = Problem((table,) * 4, ((0, 1), (1, 2), (2, 3), (3, 0)), (move,) * 4)
    pool = Pool.of_none(problem)
    pool.add(np.array([0, 2, 0, 0]))
    narrow, _ = pool.narrowed()
    assert narrow.sizes.tolist() == [2, 2, 2, 2]
    assert len(narrow.vertex_kinds.tables) == 1


@pytest.mark.parametrize("rounds", [0, 1, None])
def test_few_rounds_and_known_choices_fit_and_state_a_true_bound(
    rounds: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited_module, "_SMALL", -1.0)
    monkeypatch.setattr(limited_module, "_LARGE", -1.0)
    for seed in range(80):
        problem = random_problem(seed, with_bytes=True)
        least = solve(problem.blended(0.0, 1.0)).cost
        limit = (least + problem.total_bytes(solve(problem).choice)) / 2
        best = solve(problem, method="brute", memory_limit=limit).cost
        known = draws(problem, 2, seed)
        found = solve(problem, memory_limit=limit, known=known, rounds=rounds)
        assert found.bytes is not None
        assert found.bytes <= limit
        assert found.lower_bound <= best + 1e-9 <= found.cost + 2e-9, seed
        if rounds is None:
            assert found.lower_bound > -np.inf
