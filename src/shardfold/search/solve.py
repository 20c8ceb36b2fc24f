"""The one entrance: solve a problem with a named method."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from shardfold.errors import InputError, nearest
from shardfold.search.baselines import breadth, brute, draws, greedy, mcmc
from shardfold.search.branch_and_bound import SECONDS
from shardfold.search.elimination import ORDERS
from shardfold.search.exact import TABLE_BYTES, exact
from shardfold.search.ilp import ilp
from shardfold.search.interning import Ints
from shardfold.search.memory_limit import ROUNDS, limited
from shardfold.search.problem import Problem
from shardfold.search.solution import Answer, Choice, Solution, Statistics, Watch, ignore, reaches

METHODS = ("exact", "brute", "breadth-first", "ilp", "mcmc", "greedy", "random")

_WITH_LIMIT = ("exact", "brute", "ilp")


def solve(
    problem: Problem,
    *,
    method: str = "exact",
    order: str = "auto",
    memory_limit: float | None = None,
    table_bytes: float = TABLE_BYTES,
    seconds: float = SECONDS,
    start: Sequence[int] | None = None,
    fastest: Solution | None = None,
    cutoff: float = math.inf,
    known: list[Ints] | None = None,
    rounds: int | None = None,
    watch: Watch = ignore,
) -> Solution:
    """Find a cheapest choice whose bytes stay within `memory_limit`.

    `method` names the search and `order` the elimination order of the exact one ("auto" folds and
    takes the order with the least predicted work). `table_bytes` is what its tables may hold
    together; with less it goes over to bounds, and stops about `seconds` later with what is proven
    by then. `start` is where random moves ("mcmc") begin. A search under a limit begins from
    `fastest`, this problem's solution without one, and finds it where it is needed and not given;
    once it is proven that nothing cheaper than `cutoff` fits, it stops with what it has. `known`
    are choices that it may find useful, such as those for another limit, and to which it adds;
    `rounds` is how often it then looks at all others. The solution says whether it is optimal.
    """
    begin = time.perf_counter()
    if method not in METHODS:
        raise InputError(f"Unknown method {method!r}. {nearest(method, METHODS)}")
    if order not in ORDERS:
        raise InputError(f"Unknown order {order!r}. {nearest(order, ORDERS)}")
    if memory_limit is not None and method not in _WITH_LIMIT:
        raise InputError(
            f"Method {method!r} knows no memory limit; use {' or '.join(_WITH_LIMIT)}."
        )
    if method == "exact" and memory_limit is not None:
        answer = limited(
            problem,
            memory_limit,
            table_bytes=table_bytes,
            seconds=seconds,
            watch=watch,
            fastest=None if fastest is None else _answer(fastest),
            cutoff=cutoff,
            known=known,
            rounds=ROUNDS if rounds is None else rounds,
        )
    elif method == "exact":
        answer = exact(problem, order=order, table_bytes=table_bytes, seconds=seconds, watch=watch)
    else:
        answer = _compared(problem, method, memory_limit, table_bytes, start, watch)
    return _solution(problem, answer, method, begin)


def _compared(
    problem: Problem,
    method: str,
    limit: float | None,
    table_bytes: float,
    start: Sequence[int] | None,
    watch: Watch,
) -> Answer:
    """What another method than the exact one finds."""
    methods: dict[str, Callable[[], Answer]] = {
        "brute": lambda: brute(problem, memory_limit=limit),
        "breadth-first": lambda: breadth(problem, table_bytes=table_bytes, watch=watch),
        "ilp": lambda: ilp(problem, memory_limit=limit),
        "mcmc": lambda: mcmc(problem, start=start, watch=watch),
        "greedy": lambda: greedy(problem),
        "random": lambda: draws(problem),
    }
    return methods[method]()


def _answer(solution: Solution) -> Answer:
    """A solution as the method that found it had given it."""
    choice, found = np.array(solution.choice, dtype=np.int64), solution.statistics
    return Answer(choice, solution.lower_bound, found.order, found.largest_table, found.peak_bytes)


def _solution(problem: Problem, answer: Answer, method: str, begin: float) -> Solution:
    cost = problem.total(answer.choice) if answer.cost is None else answer.cost
    bound = cost if answer.lower_bound is None else min(answer.lower_bound, cost)
    size = problem.total_bytes(answer.choice) if problem.has_bytes else None
    choice = Choice(answer.choice)
    seconds = time.perf_counter() - begin
    statistics = Statistics(method, answer.order, seconds, answer.largest_table, answer.peak_bytes)
    return Solution(choice, cost, reaches(cost, bound), bound, size, statistics)
