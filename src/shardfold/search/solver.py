"""The one entrance: solve a problem with a named method."""

from __future__ import annotations

import time

import numpy as np

from shardfold.errors import InputError, nearest
from shardfold.search.brute import brute
from shardfold.search.exact import TABLE_BYTES, exact
from shardfold.search.problem import Problem
from shardfold.search.solution import Answer, Solution, Statistics, reaches
from shardfold.search.watch import Watch, ignore

METHODS = ("exact", "brute")


def solve(
    problem: Problem,
    *,
    method: str = "exact",
    order: str = "auto",
    memory_limit: float | None = None,
    table_bytes: float = TABLE_BYTES,
    watch: Watch = ignore,
) -> Solution:
    """Find a cheapest choice whose bytes stay within `memory_limit`.

    `method` names the search, `order` the elimination order of the exact one; `table_bytes` is
    what its tables may hold together. The solution says whether it is proven optimal.
    """
    begin = time.perf_counter()
    if method == "exact":
        answer = exact(problem, order=order, table_bytes=table_bytes, watch=watch)
    elif method == "brute":
        answer = brute(problem, memory_limit=memory_limit, watch=watch)
    else:
        raise InputError(f"Unknown method {method!r}. {nearest(method, METHODS)}")
    return _solution(problem, answer, method, begin)


def _solution(problem: Problem, answer: Answer, method: str, begin: float) -> Solution:
    cost = problem.total(answer.choice)
    bound = cost if answer.lower_bound is None else min(answer.lower_bound, cost)
    size = problem.total_bytes(answer.choice) if problem.has_bytes else None
    choice = tuple(np.asarray(answer.choice).tolist())
    seconds = time.perf_counter() - begin
    statistics = Statistics(method, answer.order, seconds, answer.largest_table, answer.peak_bytes)
    return Solution(choice, cost, reaches(cost, bound), bound, size, statistics)
