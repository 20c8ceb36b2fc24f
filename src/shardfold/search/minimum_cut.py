"""A minimum cut: which of some things to do, where doing one makes others necessary.

Every vertex is on the side of the source (done) or of the sink (not done). An edge from u to v with
a capacity is what it costs to have u done and v not. The cheapest division is a maximum flow
(Ford and Fulkerson). It is found as Dinic does: all shortest paths with room left are filled, then
all that are shortest after that, until none is left. Of divisions that cost the same, the one
nearest to the source does the least, and the one nearest to the sink the most.

Capacities are bytes or seconds of any size, which the 32-bit integers of
`scipy.sparse.csgraph.maximum_flow` do not hold.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

Arc = tuple[int, int, float]  # from, to, capacity
Room = list[dict[int, float]]  # what can still flow from each vertex to others
SOURCE, SINK = 0, 1


def minimum_cut(
    vertices: int, arcs: Sequence[Arc], nearest: Literal["source", "sink"] = "source"
) -> tuple[float, set[int]]:
    """The least cost, and what is done; vertices 0 and 1 are the source and the sink.

    >>> minimum_cut(4, [(0, 2, 3.0), (2, 1, 2.0), (2, 3, math.inf), (3, 1, 0.5)])
    (2.5, {0, 2, 3})
    """
    room: Room = [{} for _ in range(vertices)]
    for u, v, capacity in arcs:
        if capacity > 0:
            room[u][v] = room[u].get(v, 0.0) + capacity
            room[v].setdefault(u, 0.0)
    least = 1e-12 * sum(capacity for _, _, capacity in arcs if capacity < math.inf)
    total = 0.0
    while SINK in (levels := _reached(room, SOURCE, least)):
        total += _fill(room, levels, least)
    if nearest == "source":
        return total, set(levels)
    return total, set(range(vertices)) - _reached(_turned(room), SINK, least).keys()


def _reached(room: Room, start: int, least: float) -> dict[int, int]:
    """All that can be reached, with the number of steps to it."""
    levels, waiting = {start: 0}, deque([start])
    while waiting:
        u = waiting.popleft()
        for v, left in room[u].items():
            if left > least and v not in levels:
                levels[v] = levels[u] + 1
                waiting.append(v)
    return levels


def _fill(room: Room, levels: dict[int, int], least: float) -> float:
    """Let flow what can along the shortest paths; how much that is."""
    untried = [list(ends) for ends in room]
    path, total = [SOURCE], 0.0
    while path:
        u = path[-1]
        if u == SINK:
            total += _push(room, path)
            path = [SOURCE]
        elif not untried[u]:
            path.pop()
            if path:
                untried[path[-1]].pop()
        elif room[u][v := untried[u][-1]] > least and levels.get(v) == levels[u] + 1:
            path.append(v)
        else:
            untried[u].pop()
    return total


def _push(room: Room, path: Sequence[int]) -> float:
    """Fill one path; how much it takes."""
    amount = min(room[u][v] for u, v in pairwise(path))
    if math.isinf(amount):
        raise ValueError("No division has a finite cost: the sink must be done with the source.")
    for u, v in pairwise(path):
        room[u][v] -= amount
        room[v][u] += amount
    return amount


def _turned(room: Room) -> Room:
    """The same, with every edge the other way."""
    found: Room = [{} for _ in room]
    for u, ends in enumerate(room):
        for v, left in ends.items():
            found[v][u] = left
    return found
