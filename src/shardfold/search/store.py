"""Tables kept by number, each pattern of tables computed once: the hash-consing under folding.

Vertices have tables (..., k); edges have tables (..., k_u, k_v), where an even number is the table
as stored and the odd number after it is its transpose, so that turning an edge around is `^ 1`.
Leading axes belong to conditioned vertices (the newest first) and broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from shardfold.search.alike import Alike
from shardfold.search.kinds import Array
from shardfold.search.minplus import product

_WORTH_MERGING = 1 << 17
"""Joint entries from which looking for choices that make no difference pays."""


class Store:
    """Numbered tables, and what has been computed from which."""

    def __init__(self, vertices: Iterable[Array], edges: Iterable[Array]) -> None:
        self.vertices: list[Array] = list(vertices)
        self.edges: list[Array] = []
        for table in edges:
            self.edges += [table, table.swapaxes(-1, -2)]
        self._known: dict[tuple[object, ...], int] = {}
        self._alike: dict[int, Alike | None] = {}
        self.largest = max((table.size for table in (*self.vertices, *self.edges)), default=0)
        self.new_entries = 0
        self.depth = 0

    def leaf(self, vertex: int, edge: int) -> int:
        """The vertex table that remains at u when a vertex that only u knows goes away.

        out[u] = min over v of vertex[v] + edge[v, u]
        """

        def compute() -> Array:
            joint = self.vertices[vertex][..., None] + self.edges[edge]
            self.largest = max(self.largest, joint.size)
            return np.asarray(joint.min(axis=-2))

        return self._vertex(("leaf", vertex, edge), compute)

    def bridge(self, vertex: int, left: int, right: int) -> int:
        """The edge table that remains between a and b when a vertex between them goes away.

        out[a, b] = min over v of vertex[v] + left[v, a] + right[v, b]
        """
        swap = left > right
        if swap:
            left, right = right, left

        key = ("bridge", vertex, left, right)
        if key not in self._known:
            cost, first, second = self.vertices[vertex], self.edges[left], self.edges[right]
            work = cost.shape[-1] * first.shape[-1] * second.shape[-1]
            if work > _WORTH_MERGING and cost.ndim + first.ndim + second.ndim == 5:
                self._merged_bridge(key, cost, left, right)
            else:
                self._edge(key, lambda: product(first + cost[..., None], second))
        return self._known[key] ^ swap

    def _merged_bridge(self, key: tuple[object, ...], cost: Array, left: int, right: int) -> None:
        """A bridge computed once for all choices that make no difference to it."""
        first, second = self.edges[left], self.edges[right]
        a, b = self.alike(left ^ 1), self.alike(right ^ 1)
        if a is not None:
            first = first[:, a.first]
        if b is not None:
            second = second[:, b.first]
        on_left, on_right = self.alike(left), self.alike(right)
        if on_right is not None:
            first, second = on_right.least(first + cost[:, None]), second[on_right.first]
        elif on_left is not None:
            first, second = first[on_left.first], on_left.least(second + cost[:, None])
        else:
            first = first + cost[:, None]

        def compute() -> Array:
            out = product(first, second)
            out = out if a is None else out[a.kind]
            return out if b is None else out[:, b.kind]

        number = self._edge(key, compute)
        self._alike[number], self._alike[number ^ 1] = a, b

    def alike(self, edge: int) -> Alike | None:
        """The equal rows of an edge table, looked for once."""
        if edge not in self._alike:
            self._alike[edge] = Alike.find(self.edges[edge])
        return self._alike[edge]

    def add_vertices(self, first: int, second: int) -> int:
        """The sum of two vertex tables."""
        key = ("+v", min(first, second), max(first, second))
        return self._vertex(key, lambda: self.vertices[first] + self.vertices[second])

    def add_edges(self, first: int, second: int) -> int:
        """The sum of two edge tables between the same two vertices."""
        low, high = min(first, second), max(first, second)
        turn = low & 1
        low, high = low ^ turn, high ^ turn
        return self._edge(("+e", low, high), lambda: self.edges[low] + self.edges[high]) ^ turn

    def zero(self, vertex: int) -> int:
        """A table of zeros for a vertex with as many choices as `vertex`."""
        size = self.vertices[vertex].shape[-1]
        return self._vertex(("zero", size), lambda: np.zeros(size))

    def condition(self, edge: int) -> int:
        """The edge [v, c] as a table of v alone, with c as the new leading axis."""

        def compute() -> Array:
            table = self.edges[edge]
            padded = table.reshape((1,) * (self.depth + 2 - table.ndim) + table.shape)
            return np.ascontiguousarray(np.moveaxis(padded, -1, 0))

        return self._vertex(("given", edge, self.depth), compute)

    def _vertex(self, key: tuple[object, ...], compute: Callable[[], Array]) -> int:
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = len(self.vertices)
            self.vertices.append(self._count(compute()))
        return found

    def _edge(self, key: tuple[object, ...], compute: Callable[[], Array]) -> int:
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = len(self.edges)
            table = self._count(compute())
            self.edges += [table, table.swapaxes(-1, -2)]
        return found

    def _count(self, table: Array) -> Array:
        self.largest = max(self.largest, table.size)
        self.new_entries += table.size
        return table
