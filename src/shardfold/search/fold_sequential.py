"""Folding one vertex at a time: small problems, the block of a run, or what a run leaves.

The same eliminations as in `fold`, by dictionaries instead of arrays: a few microseconds a vertex,
where a round costs some hundred however few vertices it takes. A vertex with one neighbour goes
first, since it costs a product less. Of those with two the one goes that leaves the smallest table,
but a vertex whose neighbour went waits as if its own were twice as large: so equal chains shrink by
every other vertex here too, and their tables are squared instead of lengthened. A vertex that the
end of a chain has been added to waits longer: it is unlike its equals elsewhere, and the end goes
on through it once they have gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from shardfold.search.fold import fold, tidy
from shardfold.search.table_store import Folding, Step, Steps

FEW = 1_200
"""Vertices up to which one at a time is faster than rounds."""

_PATIENCE = 30
"""How often a vertex is passed over at most for the sake of its neighbours."""

_SWEPT = 3
"""How much longer a vertex waits that the end of a chain has been added to."""

Near = list[dict[int, int]]
"""Per vertex its neighbours, and the number of the table towards each."""


def fold_few(folding: Folding) -> None:
    """Fold, one vertex at a time where that is faster than in rounds."""
    if len(folding.ids) <= FEW and not folding.contexts:
        one_by_one(folding)
    else:
        tidy(folding)
        fold(folding)


def one_by_one(folding: Folding) -> None:
    """Eliminate vertices with at most two neighbours until none is left."""
    store, kind, near = folding.store, folding.kind.tolist(), _near(folding)
    queue = _Queue(folding, near)
    steps: list[Step] = []
    for v in queue:
        mine, around = kind[v], near[v]
        kind[v] = -1
        if len(around) == 2:
            (a, left), (b, right) = around.items()
            steps.append((v, mine, a, left, b, right))
            at_a, at_b = near[a], near[b]
            del at_a[v], at_b[v]
            edge = store.bridge(mine, left, right)
            if b in at_a:
                edge = store.add_edges(at_a[b], edge)
                at_a[b], at_b[a] = edge, edge ^ 1
                queue.fewer(a)
                queue.fewer(b)
            else:
                at_a[b], at_b[a] = edge, edge ^ 1
        elif around:
            ((a, left),) = around.items()
            steps.append((v, mine, a, left, -1, -1))
            del near[a][v]
            kind[a] = store.add_vertices(kind[a], store.leaf(mine, left))
            queue.fewer(a, _SWEPT)
        else:
            steps.append((v, mine, -1, -1, -1, -1))
            folding.constants.append(store.vertices[mine].min(axis=-1))
    folding.groups.append(Steps(steps, folding.ids))
    _keep(folding, kind, near)


def _near(folding: Folding) -> Near:
    """Neighbours by vertex; parallel edges are added up."""
    near: Near = [{} for _ in range(len(folding.ids))]
    add = folding.store.add_edges
    for (u, v), edge in zip(folding.ends.tolist(), folding.edge_kind.tolist(), strict=True):
        mine = near[u]
        if v in mine:
            edge = add(mine[v], edge)
        mine[v] = edge
        near[v][u] = edge ^ 1
    return near


class _Queue:
    """Which vertex goes next: ends of chains first, then by joint entries and patience.

    An entry is rank * count + vertex. Ranks that have grown since are noticed when they come up.
    """

    def __init__(self, folding: Folding, near: Near) -> None:
        self.near = near
        self.sizes: list[int] = folding.sizes.tolist()
        self.count = len(near)
        self.waited = [0] * self.count
        vertices: Sequence[int] = range(self.count)
        if folding.locked is not None:
            vertices = np.flatnonzero(~folding.locked).tolist()
            for v in np.flatnonzero(folding.locked).tolist():
                self.waited[v] = -_PATIENCE
        self.ends = [v for v in vertices if len(near[v]) <= 1]
        self.heap = [self._entry(v) for v in vertices if len(near[v]) == 2]
        heapify(self.heap)

    def _entry(self, v: int) -> int:
        a, b = self.near[v]
        return (self.sizes[a] * self.sizes[b] << self.waited[v]) * self.count + v

    def __iter__(self) -> Iterator[int]:
        heap, near, waited = self.heap, self.near, self.waited
        ends, sizes, count = self.ends, self.sizes, self.count
        while True:
            while ends:
                yield ends.pop()
            if not heap:
                return
            entry = heappop(heap)
            v = entry % count
            if len(near[v]) != 2:
                continue
            a, b = near[v]
            now = (sizes[a] * sizes[b] << waited[v]) * count + v
            if now > entry and heap and now > heap[0]:
                heappush(heap, now)
                continue
            later = min(waited[v] + 1, _PATIENCE)
            for u in (a, b):
                if 0 <= waited[u] < later:
                    waited[u] = later
            yield v

    def fewer(self, v: int, wait: int = 1) -> None:
        """A vertex lost a neighbour."""
        left = len(self.near[v])
        if left <= 2 and self.waited[v] >= 0:
            if left == 1:
                self.ends.append(v)
            elif left == 2:
                self.waited[v] = min(self.waited[v] + wait, _PATIENCE)
                heappush(self.heap, self._entry(v))


def _keep(folding: Folding, kind: list[int], near: Near) -> None:
    """What could not be eliminated, numbered anew."""
    left = [v for v, mine in enumerate(kind) if mine >= 0] if max(kind, default=-1) >= 0 else []
    number = {v: i for i, v in enumerate(left)}
    edges = [(number[u], number[v], near[u][v]) for u in left for v in near[u] if u < v]
    table = np.array(edges, dtype=np.int64).reshape(-1, 3)
    folding.ends, folding.edge_kind = table[:, :2], table[:, 2]
    folding.kind = np.array([kind[v] for v in left], dtype=np.int64)
    folding.ids, folding.sizes = folding.ids[left], folding.sizes[left]
    if folding.locked is not None:
        folding.locked = folding.locked[left]
