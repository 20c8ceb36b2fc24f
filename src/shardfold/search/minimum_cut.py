"""A minimum cut: which of some things to do, where doing one makes others necessary.

Every vertex is on the side of the source (done) or of the sink (not done). An edge from u to v with
a capacity is what it costs to have u done and v not. The cheapest division is a maximum flow
(Ford and Fulkerson): paths with room left are filled, the shortest first, until none is left; what
can still be reached from the source is done. Graphs are small here: the operators of one layer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

Arc = tuple[int, int, float]  # from, to, capacity
SOURCE, SINK = 0, 1


def minimum_cut(vertices: int, arcs: Sequence[Arc]) -> tuple[float, set[int]]:
    """The least cost, and what is done; vertices 0 and 1 are the source and the sink.

    >>> minimum_cut(4, [(0, 2, 3.0), (2, 1, 2.0), (2, 3, math.inf), (3, 1, 0.5)])
    (2.5, {0, 2, 3})
    """
    room: list[dict[int, float]] = [{} for _ in range(vertices)]
    for u, v, capacity in arcs:
        if capacity > 0:
            room[u][v] = room[u].get(v, 0.0) + capacity
            room[v].setdefault(u, 0.0)
    least = 1e-12 * sum(capacity for _, _, capacity in arcs if capacity < math.inf)
    total = 0.0
    while True:
        before = _reached(room, least)
        if SINK not in before:
            return total, set(before)
        path = [SINK]
        while path[-1] != SOURCE:
            path.append(before[path[-1]])
        steps = [(path[k + 1], path[k]) for k in range(len(path) - 1)]
        amount = min(room[u][v] for u, v in steps)
        for u, v in steps:
            room[u][v] -= amount
            room[v][u] += amount
        total += amount


def _reached(room: Sequence[dict[int, float]], least: float) -> dict[int, int]:
    """All that can be reached from the source, each with the one before it; up to the sink."""
    before, waiting = {SOURCE: SOURCE}, deque([SOURCE])
    while waiting and SINK not in before:
        u = waiting.popleft()
        for v, left in room[u].items():
            if left > least and v not in before:
                before[v] = u
                waiting.append(v)
    return before
