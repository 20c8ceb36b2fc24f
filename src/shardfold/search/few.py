"""Folding a few vertices one at a time: the block of a run, or what a run leaves of a problem.

The same eliminations as in `fold`, by dictionaries instead of arrays: less work a vertex where
there is nothing to group. It does not halve runs, so large tables are left to rounds.
"""

from __future__ import annotations

import heapq

import numpy as np

from shardfold.search.fold import fold
from shardfold.search.groups import Folding, Group

_FEW = 24
_SMALL = 40
"""Vertices, and choices a vertex, up to which one at a time is faster than a round."""


def fold_few(folding: Folding) -> None:
    """Fold, one vertex at a time where that is faster than in rounds."""
    if len(folding.ids) <= _FEW and int(folding.sizes.max(initial=0)) <= _SMALL:
        one_by_one(folding)
    else:
        fold(folding)


def one_by_one(folding: Folding) -> None:
    """Eliminate vertices with at most two neighbours, cheapest first, until none is left."""
    store, ids, sizes = folding.store, folding.ids.tolist(), folding.sizes.tolist()
    kind = folding.kind.tolist()
    near: list[dict[int, int]] = [{} for _ in ids]
    for (u, v), edge in zip(folding.ends.tolist(), folding.edge_kind.tolist(), strict=True):
        near[u][v], near[v][u] = edge, edge ^ 1
    locked = folding.locked.tolist() if folding.locked is not None else [False] * len(ids)

    def work(v: int) -> int:
        product: int = sizes[v]
        for u in near[v]:
            product *= sizes[u]
        return product

    heap = [(work(v), v) for v in range(len(ids)) if len(near[v]) <= 2 and not locked[v]]
    heapq.heapify(heap)
    gone: set[int] = set()
    while heap:
        rank, v = heapq.heappop(heap)
        if v in gone or rank != work(v) or len(near[v]) > 2:
            continue
        gone.add(v)
        around = sorted(near[v])
        edges = tuple(near[v][u] for u in around)
        numbers = tuple(np.array([ids[u]]) for u in around)
        folding.groups.append(Group(kind[v], edges, np.array([ids[v]]), numbers))
        for u in around:
            del near[u][v]
        if not around:
            folding.constants.append(store.vertices[kind[v]].min(axis=-1))
        elif len(around) == 1:
            kind[around[0]] = store.add_vertices(kind[around[0]], store.leaf(kind[v], edges[0]))
        else:
            a, b = around
            edge = store.bridge(kind[v], *edges)
            edge = store.add_edges(near[a][b], edge) if b in near[a] else edge
            near[a][b], near[b][a] = edge, edge ^ 1
        for u in around:
            if len(near[u]) <= 2 and not locked[u]:
                heapq.heappush(heap, (work(u), u))
    _keep(folding, [v for v in range(len(ids)) if v not in gone], kind, near)


def _keep(folding: Folding, left: list[int], kind: list[int], near: list[dict[int, int]]) -> None:
    """What could not be eliminated, numbered anew."""
    number = {v: i for i, v in enumerate(left)}
    edges = [(number[u], number[v], near[u][v]) for u in left for v in near[u] if u < v]
    table = np.array(edges, dtype=np.int64).reshape(-1, 3)
    folding.ends, folding.edge_kind = table[:, :2], table[:, 2]
    folding.kind = np.array([kind[v] for v in left], dtype=np.int64)
    folding.ids, folding.sizes = folding.ids[left], folding.sizes[left]
    if folding.locked is not None:
        folding.locked = folding.locked[left]
