"""Tables kept by number, each pattern of tables computed once: the hash-consing under folding.

Vertices have tables (..., k); edges have tables (..., k_u, k_v), where an even number is the table
as stored and the odd number after it is its transpose, so that turning an edge around is `^ 1`.
Leading axes belong to conditioned vertices (the newest first) and broadcast.

The state of folding: what is left of a problem, and what was eliminated how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from shardfold.search.interning import Array, Ints, Mask
from shardfold.search.minplus import Alike, product, product_of

_WORTH_MERGING = 1 << 18
"""Joint entries from which looking for choices that make no difference pays."""

_WORTH_USING = 1 << 16
"""Joint entries from which merging them pays where they have been found before."""


class Store:
    """Numbered tables, and what has been computed from which."""

    def __init__(self, vertices: Iterable[Array], edges: Iterable[Array]) -> None:
        self.vertices: list[Array] = list(vertices)
        self.edges: list[Array] = []
        for table in edges:
            self.edges += (table, table.T)
        self._leaves: dict[tuple[int, int], int] = {}
        self._bridges: dict[tuple[int, int, int], int] = {}
        self._sums: dict[tuple[int, int], int] = {}
        self._edge_sums: dict[tuple[int, int], int] = {}
        self._zeros: dict[int, int] = {}
        self._given: dict[tuple[int, int], int] = {}
        self._alike: dict[int, Alike | None] = {}
        self.largest = max([table.size for table in self.vertices + self.edges[::2]], default=0)
        self.new_entries = 0
        self.depth = 0

    def leaf(self, vertex: int, edge: int) -> int:
        """The vertex table that remains at u when a vertex that only u knows goes away.

        out[u] = min over v of vertex[v] + edge[v, u]
        """
        key = vertex, edge
        found = self._leaves.get(key)
        if found is None:
            joint = self.vertices[vertex][..., None] + self.edges[edge]
            found = self._leaves[key] = self._vertex(np.minimum.reduce(joint, axis=-2))
        return found

    def bridge(self, vertex: int, left: int, right: int) -> int:
        """The edge table that remains between a and b when a vertex between them goes away.

        out[a, b] = min over v of vertex[v] + left[v, a] + right[v, b]
        """
        swap = left > right
        key = (vertex, right, left) if swap else (vertex, left, right)
        found = self._bridges.get(key)
        if found is None:
            found = self._bridges[key] = self._bridge(*key)
        return found ^ swap

    def _bridge(self, vertex: int, left: int, right: int) -> int:
        cost, first, second = self.vertices[vertex], self.edges[left], self.edges[right]
        if self.depth and cost.ndim + first.ndim + second.ndim > 5:
            return self.edge(product(first + cost[..., None], second))
        entries = first.size * second.shape[1]
        if entries > _WORTH_MERGING:
            return self._merged_bridge(cost, left, right, self.alike)
        known = self._alike
        if entries > _WORTH_USING and not known.keys().isdisjoint(
            (left, left ^ 1, right, right ^ 1)
        ):
            return self._merged_bridge(cost, left, right, known.get)
        return self.edge(product_of(first + cost[:, None], second))

    def _merged_bridge(
        self, cost: Array, left: int, right: int, alike: Callable[[int], Alike | None]
    ) -> int:
        """A bridge computed once for all choices that make no difference to it."""
        first, second = self.edges[left], self.edges[right]
        a, b = alike(left ^ 1), alike(right ^ 1)
        if a is not None:
            first = first[:, a.first]
        if b is not None:
            second = second[:, b.first]
        on_left, on_right = alike(left), alike(right)
        if on_right is not None:
            first, second = on_right.least(first + cost[:, None]), second[on_right.first]
        elif on_left is not None:
            first, second = first[on_left.first], on_left.least(second + cost[:, None])
        else:
            first = first + cost[:, None]
        out = product_of(first, second)
        out = out if a is None else out[a.kind]
        number = self.edge(out if b is None else out[:, b.kind])
        if left ^ 1 in self._alike:
            self._alike[number] = a
        if right ^ 1 in self._alike:
            self._alike[number ^ 1] = b
        return number

    def alike(self, edge: int) -> Alike | None:
        """The equal rows of an edge table, looked for once."""
        if edge not in self._alike:
            self._alike[edge] = Alike.find(self.edges[edge])
        return self._alike[edge]

    def add_vertices(self, first: int, second: int) -> int:
        """The sum of two vertex tables."""
        key = (first, second) if first < second else (second, first)
        found = self._sums.get(key)
        if found is None:
            total = self.vertices[first] + self.vertices[second]
            found = self._sums[key] = self._vertex(total)
        return found

    def add_edges(self, first: int, second: int) -> int:
        """The sum of two edge tables between the same two vertices."""
        low, high = (first, second) if first < second else (second, first)
        turn = low & 1
        key = low ^ turn, high ^ turn
        found = self._edge_sums.get(key)
        if found is None:
            total = self.edges[key[0]] + self.edges[key[1]]
            found = self._edge_sums[key] = self.edge(total)
        return found ^ turn

    def zero(self, vertex: int) -> int:
        """A table of zeros for a vertex with as many choices as `vertex`."""
        size = self.vertices[vertex].shape[-1]
        if size not in self._zeros:
            self._zeros[size] = self._vertex(np.zeros(size))
        return self._zeros[size]

    def condition(self, edge: int) -> int:
        """The edge [v, c] as a table of v alone, with c as the new leading axis."""
        key = edge, self.depth
        if key not in self._given:
            table = self.edges[edge]
            padded = table.reshape((1,) * (self.depth + 2 - table.ndim) + table.shape)
            self._given[key] = self._vertex(np.ascontiguousarray(np.moveaxis(padded, -1, 0)))
        return self._given[key]

    def _vertex(self, table: Array) -> int:
        """A number for a new vertex table."""
        self.new_entries += table.size
        self.vertices.append(table)
        return len(self.vertices) - 1

    def edge(self, table: Array) -> int:
        """A number for a new edge table; the next number is its transpose."""
        size = table.size
        self.new_entries += size
        if size > self.largest:
            self.largest = size
        self.edges += (table, table.swapaxes(-1, -2) if self.depth else table.T)
        return len(self.edges) - 2


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Vertices eliminated alike: the table numbers around each, each one's neighbour per edge."""

    vertex: int
    edges: tuple[int, ...]
    members: Ints
    neighbours: tuple[Ints, ...]


Step = tuple[int, int, int, int, int, int]
"""An elimination: a vertex, its table, and twice a neighbour and the table towards it; -1: none."""


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Eliminations one by one; vertices are numbered by their place in `ids`."""

    steps: list[Step]
    ids: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A stretch of `copies` equal blocks, each of `period` vertices from vertex `begin` on.

    Block t hangs on two joints only, joint + (t and t + 1) * period; the second is one of its own
    vertices. `edges` are the edges of block 0; those of block t are t * len(edges) further on.
    """

    period: int
    copies: int
    joint: int
    begin: int
    edges: Ints

    @property
    def end(self) -> int:
        """The first vertex after the last block."""
        return self.begin + self.copies * self.period

    @property
    def last(self) -> int:
        """The joint after the last block."""
        return self.joint + self.copies * self.period


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """A run folded away: the eliminations inside block 0, and then of joints between blocks.

    `vertex` is the table of such a joint and `powers[k]` the table between joints 2^k blocks apart.
    The run begins with pieces of the longest such length. The joints between those, but for the
    last, all take one of the choices `steady`, which cost `staying` for all of them together.
    """

    run: Run
    inside: Steps
    vertex: int
    powers: tuple[int, ...]
    steady: Ints
    staying: Array

    @property
    def piece(self) -> int:
        """Blocks in one of the longest pieces."""
        return 1 << len(self.powers) - 1

    @property
    def spare(self) -> int:
        """Pieces that are equal to the second, since the joints at their ends are."""
        return max(self.run.copies // self.piece - 4, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What the blocks of a run chose: how many times each distinct row occurs.

    A row is the choice of the joint before a block, and of the block's own vertices.
    """

    run: Run
    rows: Ints
    counts: Ints


@dataclass(slots=True, eq=False)
class Folding:
    """What is left of a problem, and how to get back: the state that rounds work on.

    Vertices are numbered 0..len(ids)-1 here; `ids` are their numbers in the problem. Those that
    are `locked` are never eliminated.
    """

    store: Store
    ids: Ints
    sizes: Ints
    kind: Ints
    ends: Ints
    edge_kind: Ints
    groups: list[Group | Steps | Blocks] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    constants: list[Array] = field(default_factory=list)
    locked: Mask | None = None
