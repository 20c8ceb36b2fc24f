"""Search methods for comparison: brute force, breadth-first, random, greedy and MCMC.

Brute force: every combination, in blocks of a million; the oracle for small problems.

Breadth-first dynamic programming: the comparison of the PaSE paper, not a method to use.

The recurrence is that of `eliminate`; only the order is the graph's own, from its first vertex on.
On branching graphs the tables span the whole front of the search and soon fit no memory.

Random draws: the baseline that any search has to beat.

Greedy: each vertex in turn takes what is cheapest next to the vertices before it.

Markov-chain search in FlexFlow's way: random moves, worse ones accepted now and then.

From a current choice of cost c, one vertex drawn at random gets a choice drawn at random; the new
cost d is accepted with probability min(1, exp(beta (c - d))). The best choice met is the answer.
The search ends after 250,000 moves, or when half of the time spent so far has brought nothing,
unless `patient`. It proves nothing. Work per move: one entry for each edge of the
vertex.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from shardfold.errors import InfeasibleError, InputError
from shardfold.search.elimination import eliminate, factors_of, forecast, trace_back
from shardfold.search.interning import Array, Ints, Kinds
from shardfold.search.local_search import Near, around
from shardfold.search.problem import Problem
from shardfold.search.solution import Answer, Progress, Watch, ignore

LIMIT = 50_000_000
"""Combinations beyond which trying them all would take minutes."""

_BLOCK = 1 << 20


def brute(problem: Problem, *, memory_limit: float | None = None) -> Answer:
    """Try every combination; the first cheapest that fits. Work: the product of the sizes."""
    count = math.prod(problem.sizes.tolist())
    if count > LIMIT:
        raise InputError(
            f"Brute force would try {count:.3g} combinations, more than {LIMIT:.3g}. "
            f"Use method 'exact'."
        )
    best, choice, smallest = math.inf, None, math.inf
    for start in range(0, count, _BLOCK):
        x = _combinations(problem.sizes, start, min(start + _BLOCK, count))
        costs = _totals(problem, x, problem.vertex_kinds, problem.edge_kinds)
        if memory_limit is not None:
            sizes = _totals(problem, x, problem.byte_kinds, problem.edge_byte_kinds)
            smallest = min(smallest, float(sizes.min()))
            costs[sizes > memory_limit] = math.inf
        at = int(np.argmin(costs))
        if costs[at] < best:
            best, choice = float(costs[at]), x[at]
    if choice is None:
        raise InfeasibleError(needed_bytes=smallest, limit_bytes=memory_limit or 0.0)
    return Answer(choice, largest_table=min(count, _BLOCK))


def _combinations(sizes: Ints, start: int, stop: int) -> Ints:
    """Combinations start..stop-1, the last vertex varying fastest."""
    rest = np.arange(start, stop, dtype=np.int64)
    x = np.empty((len(rest), len(sizes)), dtype=np.int64)
    for v in range(len(sizes) - 1, -1, -1):
        rest, x[:, v] = np.divmod(rest, sizes[v])
    return x


def _totals(problem: Problem, x: Ints, vertex: Kinds | None, edge: Kinds | None) -> Array:
    total = np.zeros(len(x))
    if vertex is not None:
        for v, kind in enumerate(vertex.of.tolist()):
            total += vertex.tables[kind][x[:, v]]
    if edge is not None:
        for (u, v), kind in zip(problem.ends.tolist(), edge.of.tolist(), strict=True):
            total += edge.tables[kind][x[:, u], x[:, v]]
    return total


def breadth(problem: Problem, *, table_bytes: float, watch: Watch = ignore) -> Answer:
    """Eliminate breadth-first; an error, before anything is allocated, if that cannot fit."""
    factors = factors_of(problem)
    plan = forecast(factors, "breadth-first")
    if 8 * plan.stored > table_bytes:
        raise InputError(
            f"Breadth-first tables need {8 * plan.stored:.3g} bytes, more than the "
            f"{table_bytes:.3g} allowed. Use method 'exact', which chooses its own order."
        )
    chosen: dict[int, int] = {}
    trail, optimum = eliminate(factors, plan.order, watch)
    trace_back(trail, chosen)
    choice = np.array([chosen[v] for v in range(len(problem))], dtype=np.int64)
    return Answer(choice, optimum, plan.name, int(plan.largest), int(8 * plan.stored))


DRAWS = 1_000


def draws(problem: Problem, *, seed: int = 0, count: int = DRAWS) -> Answer:
    """The cheapest of `count` uniform random choices."""
    random = np.random.default_rng(seed)
    drawn = [random.integers(problem.sizes) for _ in range(count)]
    return Answer(min(drawn, key=problem.total), -np.inf)


def greedy(problem: Problem) -> Answer:
    """One pass in vertex order, never looking ahead. Work: the entries of one row per edge."""
    before: list[list[tuple[int, int]]] = [[] for _ in range(len(problem))]
    for number, (u, v) in enumerate(problem.ends.tolist()):
        before[max(u, v)].append((number, min(u, v)))
    choice = np.zeros(len(problem), np.int64)
    for vertex, earlier in enumerate(before):
        score = problem.costs[vertex]
        for number, other in earlier:
            table = problem.edge_costs[number]
            is_source = other == problem.ends[number, 0]
            score = score + (table if is_source else table.T)[choice[other]]
        choice[vertex] = int(np.argmin(score))
    return Answer(choice, -np.inf)


MOVES = 250_000
_BETA = 200.0
"""Relative to the starting cost: a move that makes it 0.5% worse is accepted one time in e."""

_CHECK = 1_000
_LEAST = 50_000


def mcmc(
    problem: Problem,
    *,
    start: Sequence[int] | None = None,
    seed: int = 0,
    moves: int = MOVES,
    patient: bool = False,
    watch: Watch = ignore,
) -> Answer:
    """Improve `start` (by default every vertex's first choice) by random moves.

    Where it is `patient`, all moves are made.
    """
    begin = time.perf_counter()
    current = list(start) if start is not None else [0] * len(problem)
    cost = best_cost = problem.total(current)
    best, best_at = list(current), begin
    beta = _BETA / max(abs(cost), 1e-300)
    edges = around(problem)
    random = np.random.default_rng(seed)
    for move in range(moves if len(problem) else 0):
        if move % _CHECK == 0:
            vertices = random.integers(len(problem), size=_CHECK)
            drawn = random.integers(problem.sizes[vertices]).tolist()
            luck = (-random.standard_exponential(_CHECK)).tolist()
            turn = vertices.tolist()
            now = time.perf_counter()
            watch(Progress("mcmc", move, moves, best_cost=best_cost))
            if not patient and move >= _LEAST and now - best_at > (now - begin) / 2:
                break
        vertex, new = turn[move % _CHECK], drawn[move % _CHECK]
        change = _change(problem, edges[vertex], vertex, current, new)
        if change <= 0 or luck[move % _CHECK] < -beta * change:
            current[vertex] = new
            cost += change
            if cost < best_cost:
                best, best_cost, best_at = list(current), cost, time.perf_counter()
    return Answer(np.array(best, dtype=np.int64), -math.inf)


def _change(
    problem: Problem,
    near: list[Near],
    vertex: int,
    current: list[int],
    new: int,
) -> float:
    """How the total changes when one vertex moves."""
    old = current[vertex]
    costs = problem.costs[vertex]
    change = costs.item(new) - costs.item(old)
    for number, other, is_source in near:
        table, there = problem.edge_costs[number], current[other]
        if is_source:
            change += table.item(new, there) - table.item(old, there)
        else:
            change += table.item(there, new) - table.item(there, old)
    return change
