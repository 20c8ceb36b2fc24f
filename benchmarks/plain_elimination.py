"""A plain numpy elimination, without folding or bounds: the floor that the search is held against.

The order is min-degree by table size; every step builds the joint table of a vertex and its
neighbours, and takes its minimum. Nothing is shared between alike steps.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from shardfold.search import Problem


def plain_elimination(problem: Problem) -> tuple[float, list[int]]:
    """The optimum and its choice."""
    tables = {number: ((v,), cost) for number, (v, cost) in enumerate(enumerate(problem.costs))}
    for edge, table in zip(problem.edges, problem.edge_costs, strict=True):
        tables[len(tables)] = (edge, table)
    sizes = problem.sizes.tolist()
    near: list[set[int]] = [set() for _ in sizes]
    touching: list[set[int]] = [set() for _ in sizes]
    for number, (scope, _) in tables.items():
        for v in scope:
            near[v].update(scope)
            touching[v].add(number)
    for v in range(len(sizes)):
        near[v].discard(v)

    def entries(v: int) -> int:
        return math.prod(sizes[u] for u in near[v])

    heap = [(entries(v), v) for v in range(len(sizes))]
    heapq.heapify(heap)
    gone: set[int] = set()
    trail = []
    while heap:
        rank, v = heapq.heappop(heap)
        if v in gone or rank != entries(v):
            continue
        scope = (*sorted(near[v]), v)
        mine = [tables[number] for number in sorted(touching[v])]
        joint = np.zeros([1] * len(scope))
        for table in sorted((spread(*one, scope) for one in mine), key=lambda table: table.size):
            joint = joint + table
        trail.append((v, mine))
        gone.add(v)
        for number in list(touching[v]):
            for u in tables[number][0]:
                touching[u].discard(number)
        tables[len(tables)] = (scope[:-1], joint.min(axis=-1))
        for u in near[v]:
            touching[u].add(len(tables) - 1)
            near[u] |= near[v]
            near[u] -= {u, v}
        for u in near[v]:
            heapq.heappush(heap, (entries(u), u))
    return read_back(problem, trail)


def spread(mine: tuple[int, ...], table: np.ndarray, scope: tuple[int, ...]) -> np.ndarray:
    """`table` with its axes in the order of `scope`, of length 1 where it has none."""
    axes = [mine.index(v) for v in scope if v in mine]
    shape = [table.shape[mine.index(v)] if v in mine else 1 for v in scope]
    return table.transpose(axes).reshape(shape)


def read_back(problem: Problem, trail: list) -> tuple[float, list[int]]:
    """Choices from the last eliminated to the first."""
    choice = [0] * len(problem)
    for v, mine in reversed(trail):
        rows = [
            table[tuple(slice(None) if u == v else choice[u] for u in scope)]
            for scope, table in mine
        ]
        choice[v] = int(np.argmin(sum(rows)))
    return problem.total(choice), choice
