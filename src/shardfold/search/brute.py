"""Brute force: every combination, in blocks of a million; the oracle for small problems."""

from __future__ import annotations

import math

import numpy as np

from shardfold.errors import InfeasibleError, InputError
from shardfold.search.kinds import Array, Ints, Kinds
from shardfold.search.problem import Problem
from shardfold.search.solution import Answer

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
