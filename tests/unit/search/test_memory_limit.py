from __future__ import annotations

import numpy as np
import pytest

from shardfold.search import Problem
from shardfold.search.memory_limit import splice


def some_problem(seed: int) -> Problem:
    random = np.random.default_rng(seed)
    edges = tuple((int(u), int(v)) for u, v in random.integers(0, 9, (14, 2)) if u != v)
    costs, sizes = ([random.random(3) for _ in range(9)] for _ in range(2))
    tables, between = ([random.random((3, 3)) for _ in edges] for _ in range(2))
    return Problem(tuple(costs), edges, tuple(tables), tuple(sizes), tuple(between))


@pytest.mark.parametrize("seed", range(20))
def test_splice_is_the_cheapest_cut_that_fits(seed: int) -> None:
    problem = some_problem(seed)
    random = np.random.default_rng(seed)
    first, second = random.integers(0, 3, 9), random.integers(0, 3, 9)
    cuts = [np.concatenate([first[:cut], second[cut:]]) for cut in range(10)]
    limit = float(np.median([problem.total_bytes(cut) for cut in cuts]))
    fitting = [cut for cut in cuts if problem.total_bytes(cut) <= limit]
    found = splice(problem, first, second, limit)
    assert found is not None
    assert problem.total_bytes(found) <= limit + 1e-9
    assert problem.total(found) == pytest.approx(min(map(problem.total, fitting)))


def test_splice_finds_nothing_where_nothing_fits() -> None:
    problem = some_problem(0)
    assert splice(problem, np.zeros(9, np.int64), np.ones(9, np.int64), 0.0) is None
