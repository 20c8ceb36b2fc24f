"""Which vertices a round of folding eliminates: cheap ones, no two of them neighbours."""

from __future__ import annotations

import numpy as np

from shardfold.search.kinds import Array, Ints, Mask

_FREE = 100_000
"""Tables with at most this many joint entries cost less than the calls that build them."""

_STEP = 500_000
"""A round costs about as much as this many joint entries."""

_SPREAD = 8
"""When only dear vertices are left, those within this factor of the cheapest go."""


def pick(sizes: Ints, ends: Ints, kind: Ints, locked: Mask | None = None) -> Ints:
    """Vertices with at most two neighbours to eliminate next; no two of them are neighbours."""
    count = len(sizes)
    u, v = ends[:, 0], ends[:, 1]
    degree = np.bincount(ends.reshape(-1), minlength=count)
    if locked is not None:
        degree[locked] = count + 3
    take = degree <= 1
    both = take[u] & take[v]
    take[v[both]] = False
    bridging = degree == 2
    if bridging.any():
        near = np.zeros(count, dtype=bool)
        near[u[take[v]]] = True
        near[v[take[u]]] = True
        bridging &= ~near
        work = _work(sizes, u, v, count)
        allowed = bridging & _worthwhile(sizes, work, kind, bridging, bool(take.any()))
        take |= _independent(allowed, work, u, v)
    return np.flatnonzero(take)


def _work(sizes: Ints, u: Ints, v: Ints, count: int) -> Array:
    """Entries of the joint table of each vertex with its neighbours, as floats."""
    log = np.log(sizes.astype(np.float64))
    total = log.copy()
    np.add.at(total, u, log[v])
    np.add.at(total, v, log[u])
    return np.exp(np.minimum(total, 600.0)).round()


def _worthwhile(sizes: Ints, work: Array, kind: Ints, bridging: Mask, others: bool) -> Mask:
    """Which bridges to build now rather than wait for a sweep of leaves to come by.

    A run of m alike vertices costs about log2(m) + 1 products when halved, and m leaves when
    swept from its end. Where no leaf is left, the cheapest go.
    """
    alike = np.bincount(kind[bridging], minlength=int(kind.max()) + 1)[kind]
    halving = work * (np.log2(np.maximum(alike, 1)) + 1)
    sweeping = alike * (_STEP + work / sizes)
    now: Mask = (work <= _FREE) | (halving <= sweeping)
    if not others and not (now & bridging).any():
        now = work <= _SPREAD * work[bridging].min(initial=np.inf)
    return now


def _independent(allowed: Mask, work: Array, u: Ints, v: Ints) -> Mask:
    """A subset without neighbours: the cheaper of two, and every other one along equal runs."""
    inside = allowed[u] & allowed[v]
    u, v = u[inside], v[inside]
    if not u.size:
        return allowed
    chosen = allowed.copy()
    chosen[np.where(work[u] > work[v], u, v)[work[u] != work[v]]] = False
    tie = (work[u] == work[v]) & chosen[u] & chosen[v]
    low, high = np.minimum(u, v)[tie], np.maximum(u, v)[tie]
    if low.size:
        odd = _depth(low, high, len(allowed)) & 1 == 1
        chosen &= ~odd
        clash = chosen[low] & chosen[high]
        chosen[high[clash]] = False
    return chosen


def _depth(low: Ints, high: Ints, count: int) -> Ints:
    """Distance of each vertex from the start of its run, by pointer doubling."""
    before = np.arange(count)
    order = np.argsort(low, kind="stable")
    before[high[order]] = low[order]
    depth = (before != np.arange(count)).astype(np.int64)
    while True:
        further = before[before]
        if (further == before).all():
            return np.asarray(depth)
        depth = depth + depth[before]
        before = further
