"""Single moves: what lies around a vertex, what each of its choices adds, and steps downhill."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from shardfold.search.interning import Array, Ints, Kinds
from shardfold.search.problem import Problem


class Near(NamedTuple):
    """An edge of a vertex: its number, the vertex at its other end, and which end is our own."""

    edge: int
    other: int
    is_source: bool


Around = list[list[Near]]  # by vertex


def around(problem: Problem) -> Around:
    """The edges of every vertex.

    >>> table = np.zeros((1, 1))
    >>> around(Problem((np.zeros(1), np.zeros(1)), ((0, 1),), (table,)))[1]
    [Near(edge=0, other=0, is_source=False)]
    """
    found: Around = [[] for _ in range(len(problem))]
    for number, (u, v) in enumerate(problem.ends.tolist()):
        found[u].append(Near(number, v, True))
        found[v].append(Near(number, u, False))
    return found


def added_costs(problem: Problem, vertex: int, near: list[Near], choice: Ints) -> Array:
    """What each choice of a vertex costs, with its edges, the others staying."""
    return _added(problem.vertex_kinds, problem.edge_kinds, vertex, near, choice)


def added_bytes(problem: Problem, vertex: int, near: list[Near], choice: Ints) -> Array:
    """The bytes of each choice of a vertex, with its edges, the others staying."""
    found = _added(problem.byte_kinds, problem.edge_byte_kinds, vertex, near, choice)
    return np.broadcast_to(found, problem.sizes[vertex])


def _added(
    vertex_kinds: Kinds | None,
    edge_kinds: Kinds | None,
    vertex: int,
    near: list[Near],
    choice: Ints,
) -> Array:
    row: Array = np.zeros(1)
    if vertex_kinds is not None:
        row = vertex_kinds.tables[vertex_kinds.of[vertex]]
    if edge_kinds is not None:
        for edge, other, is_source in near:
            table = edge_kinds.tables[edge_kinds.of[edge]]
            row = row + (table[:, choice[other]] if is_source else table[choice[other]])
    return row


def descend(problem: Problem, choice: Ints, limit: float = math.inf, passes: int = 3) -> Ints:
    """Move single vertices to cheaper choices that still fit, while that helps."""
    choice, edges = choice.copy(), around(problem)
    free = limit - problem.total_bytes(choice)
    for _ in range(passes):
        moved = False
        for vertex, near in enumerate(edges):
            here = int(choice[vertex])
            cost = added_costs(problem, vertex, near, choice)
            size = added_bytes(problem, vertex, near, choice)
            fits = np.where(size - size[here] <= free, cost, np.inf)
            fits[here] = cost[here]
            best = int(np.argmin(fits))
            if fits[best] < cost[here]:
                free -= float(size[best] - size[here])
                choice[vertex], moved = best, True
        if not moved:
            break
    return choice
