"""The one entrance: solve a problem with a named method."""

from __future__ import annotations

from shardfold.search.exact import exact
from shardfold.search.problem import Problem
from shardfold.search.solution import Solution
from shardfold.search.watch import Watch, ignore


def solve(
    problem: Problem,
    *,
    method: str = "exact",
    order: str = "auto",
    memory_limit: float | None = None,
    watch: Watch = ignore,
) -> Solution:
    """Find a cheapest choice whose bytes stay within `memory_limit`."""
    if method != "exact" or memory_limit is not None:
        raise NotImplementedError
    return exact(problem, order=order, watch=watch)
