"""Elimination orders: which vertex goes next, and what an order will cost before it is run.

Every rule looks at the vertices that a vertex shares a table with at the moment it would go:

- `generate-seq` (PaSE): the fewest of them;
- `min-degree`: the fewest entries in the table that it would leave behind;
- `min-fill`: the fewest pairs of them that do not know each other yet;
- `breadth-first`: the graph's own order from its first vertex, for comparison.

Each step joins the neighbours with each other. A rule costs O(n d^2 log n) for degree d.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardfold.errors import InputError, nearest
from shardfold.search.factors import Factors

Near = list[set[int]]
Rank = Callable[[int, Near, Sequence[float]], float]


@dataclass(frozen=True, slots=True)
class Forecast:
    """What eliminating along an order needs: entries of the largest table, of all, and work."""

    order: tuple[int, ...]
    name: str
    largest: float
    stored: float
    work: float


def _degree(vertex: int, near: Near, logs: Sequence[float]) -> float:
    return len(near[vertex])


def _weight(vertex: int, near: Near, logs: Sequence[float]) -> float:
    return sum(logs[u] for u in near[vertex])


def _fill(vertex: int, near: Near, logs: Sequence[float]) -> float:
    mine = near[vertex]
    return sum(len(mine) - 1 - len(mine & near[u]) for u in mine)


_RANKS: dict[str, Rank] = {"generate-seq": _degree, "min-degree": _weight, "min-fill": _fill}

_NO_MATTER = 1e6
"""Joint entries that are added up sooner than another order is found."""

ORDERS = ("auto", *_RANKS, "breadth-first")


def forecast(factors: Factors, name: str) -> Forecast:
    """The order called `name`, or for "auto" the one with the least predicted work."""
    if name == "auto":
        first = forecast(factors, "min-degree")
        if first.work <= _NO_MATTER:
            return first
        tried = [first, forecast(factors, "min-fill"), forecast(factors, "generate-seq")]
        return min(tried, key=lambda f: (f.work, f.largest))
    if name == "breadth-first":
        return cost_of(factors, breadth_first(factors), name)
    if name not in _RANKS:
        raise InputError(f"Unknown order {name!r}. {nearest(name, ORDERS)}")
    return greedy_order(factors, _RANKS[name], name)


def greedy_order(factors: Factors, rank: Rank, name: str) -> Forecast:
    """Repeatedly the vertex of lowest rank, lowest number first among equals."""
    near = factors.around()
    logs = [math.log(size) for size in factors.sizes]
    heap = [(rank(v, near, logs), v) for v in range(len(near))]
    heapq.heapify(heap)
    current = {v: value for value, v in heap}
    order, left = list[int](), list[float]()
    while heap:
        value, vertex = heapq.heappop(heap)
        if current.get(vertex) != value:
            continue
        order.append(vertex)
        left.append(_weight(vertex, near, logs))
        del current[vertex]
        for u in _remove(vertex, near):
            new = rank(u, near, logs)
            if new != current[u]:
                current[u] = new
                heapq.heappush(heap, (new, u))
    return _forecast(factors, order, left, name)


def breadth_first(factors: Factors) -> tuple[int, ...]:
    """Vertices in order of distance from the first of each part."""
    near, seen, order = factors.around(), set[int](), list[int]()
    for root in range(len(near)):
        if root in seen:
            continue
        seen.add(root)
        queue = [root]
        for vertex in queue:
            fresh = sorted(near[vertex] - seen)
            seen.update(fresh)
            queue += fresh
        order += queue
    return tuple(order)


def cost_of(factors: Factors, order: Sequence[int], name: str) -> Forecast:
    """Run `order` on sizes only."""
    near = factors.around()
    logs = [math.log(size) for size in factors.sizes]
    left = []
    for vertex in order:
        left.append(_weight(vertex, near, logs))
        _remove(vertex, near)
    return _forecast(factors, order, left, name)


def _forecast(factors: Factors, order: Sequence[int], left: Sequence[float], name: str) -> Forecast:
    """The cost of an order, given the logarithm of the entries that each step leaves behind."""
    entries = [math.exp(min(log, 600.0)) for log in left]
    work = sum(e * factors.sizes[vertex] for e, vertex in zip(entries, order, strict=True))
    return Forecast(tuple(order), name, max(entries, default=0.0), sum(entries), work)


def _remove(vertex: int, near: Near) -> set[int]:
    """Take a vertex out and join its neighbours; they are returned."""
    mine = near[vertex]
    for u in mine:
        near[u] |= mine
        near[u] -= {u, vertex}
    return mine
