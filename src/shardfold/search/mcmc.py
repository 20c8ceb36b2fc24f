"""Markov-chain search in FlexFlow's way: random moves, worse ones accepted now and then.

From a current choice of cost c, one vertex drawn at random gets a choice drawn at random; the new
cost d is accepted with probability min(1, exp(beta (c - d))). The best choice met is the answer.
The search ends after 250,000 moves, or when half of the time spent so far has brought nothing,
unless it is told to be patient. It proves nothing. Work per move: one entry for each edge of the
vertex.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from shardfold.search.descent import Near, around
from shardfold.search.problem import Problem
from shardfold.search.solution import Answer
from shardfold.search.watch import Progress, Watch, ignore

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
