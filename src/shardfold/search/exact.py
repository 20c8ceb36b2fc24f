"""Exact elimination."""

from __future__ import annotations

import time

import numpy as np

from shardfold.search.kinds import Array
from shardfold.search.problem import Problem
from shardfold.search.solution import Solution, Statistics
from shardfold.search.watch import Watch, ignore


def exact(problem: Problem, *, order: str = "auto", watch: Watch = ignore) -> Solution:
    """Find a cheapest choice by min-sum elimination, and prove it cheapest."""
    start = time.perf_counter()
    n = len(problem)
    tables: list[tuple[tuple[int, ...], Array]] = [((v,), c) for v, c in enumerate(problem.costs)]
    tables += list(zip(problem.edges, problem.edge_costs, strict=True))
    around: list[set[int]] = [set() for _ in range(n)]
    for t, (scope, _) in enumerate(tables):
        for v in scope:
            around[v].add(t)
    left = set(range(n))
    trail: list[tuple[int, list[int]]] = []
    largest = 0

    def later(v: int) -> list[int]:
        return sorted({u for t in around[v] for u in tables[t][0]} - {v})

    while left:
        v = min(left, key=lambda v: (int(np.prod([len(problem.costs[u]) for u in later(v)])), v))
        mine, scope = sorted(around[v]), (*later(v), v)
        joint = np.zeros([len(problem.costs[u]) for u in scope])
        for t in mine:
            joint = joint + _spread(tables[t], scope)
        largest = max(largest, joint.size)
        trail.append((v, mine))
        tables.append((scope[:-1], joint.min(axis=-1)))
        for t in mine:
            for u in tables[t][0]:
                around[u].discard(t)
        for u in scope[:-1]:
            around[u].add(len(tables) - 1)
        left.remove(v)
    choice = [0] * n
    for v, mine in reversed(trail):
        best = np.zeros(len(problem.costs[v]))
        for t in mine:
            s, table = tables[t]
            best = best + table[tuple(slice(None) if u == v else choice[u] for u in s)]
        choice[v] = int(np.argmin(best))
    cost = problem.total(choice)
    statistics = Statistics("exact", order, time.perf_counter() - start, largest, 8 * largest)
    size = problem.total_bytes(choice) if problem.has_bytes else None
    return Solution(tuple(choice), cost, True, cost, size, statistics)


def _spread(table: tuple[tuple[int, ...], Array], scope: tuple[int, ...]) -> Array:
    """`table` with its axes in the order of `scope`, and length 1 where it has none."""
    mine, values = table
    axes = sorted(range(len(mine)), key=lambda i: scope.index(mine[i]))
    shape = [values.shape[mine.index(v)] if v in mine else 1 for v in scope]
    return values.transpose(axes).reshape(shape)
