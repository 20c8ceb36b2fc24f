"""Random draws: the baseline that any search has to beat."""

from __future__ import annotations

import numpy as np

from shardfold.search.problem import Problem
from shardfold.search.solution import Answer

DRAWS = 1_000


def draws(problem: Problem, *, seed: int = 0, count: int = DRAWS) -> Answer:
    """The cheapest of `count` uniform random choices."""
    random = np.random.default_rng(seed)
    drawn = [random.integers(problem.sizes) for _ in range(count)]
    return Answer(min(drawn, key=problem.total), -np.inf)
