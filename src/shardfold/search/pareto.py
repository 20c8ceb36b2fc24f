"""Exact search under a memory limit: elimination whose table entries are Pareto fronts.

An entry of R_v[N(v)] is the set of (cost, bytes) pairs that the part behind it can reach, without
those that are no better in either. Fronts of parts are added pair by pair, fronts of different
choices of v are united. The cheapest pair of the last front that fits is the optimum.

A pair is also dropped when even the best completion cannot help: with O the cheapest outside cost
at Lagrange weight w (see `marginals`), cost + w bytes + O - w limit is a lower bound on every
choice that contains it. Near the right weight few pairs survive that test.

Where a front grows past `width` only the pairs of lowest bound are kept, and the result is no
longer a proof, only a choice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardfold.search.kinds import Array, Ints
from shardfold.search.marginals import Marginals
from shardfold.search.pairwise import Pairwise


@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """Pairs by rising cost and falling bytes, with the choice and the child pairs behind each."""

    cost: Array
    bytes: Array
    choice: Ints
    behind: Ints


@dataclass(slots=True, eq=False)
class Bounds:
    """What makes a pair useless: the limit, the best cost known, and costs outside by bucket."""

    limit: float
    best: float
    weight: float
    blend: Marginals
    smallest: Marginals


@dataclass(frozen=True, slots=True, eq=False)
class _Bucket:
    vertex: int
    scope: tuple[int, ...]
    children: tuple[int, ...]
    fronts: dict[tuple[int, ...], Front]


def pareto(
    cost: Pairwise, size: Pairwise, order: Sequence[int], bounds: Bounds, width: int
) -> tuple[list[int] | None, bool]:
    """The cheapest choice within the limit that beats `bounds.best`, and whether that is proven."""
    position = {v: i for i, v in enumerate(order)}
    pairs: dict[int, list[int]] = {v: [] for v in order}
    for number, pair in enumerate(cost.pairs):
        pairs[min(pair, key=position.__getitem__)].append(number)
    waiting: dict[int, list[int]] = {v: [] for v in order}
    buckets: dict[int, _Bucket] = {}
    complete, roots = True, list[int]()
    for v in order:
        bucket, whole = _eliminate(v, pairs[v], waiting[v], buckets, cost, size, bounds, width)
        complete &= whole
        buckets[v] = bucket
        if bucket.scope:
            waiting[min(bucket.scope, key=position.__getitem__)].append(v)
        else:
            roots.append(v)
    return _choose(buckets, roots, bounds), complete


def _eliminate(
    v: int,
    pairs: list[int],
    children: list[int],
    buckets: dict[int, _Bucket],
    cost: Pairwise,
    size: Pairwise,
    bounds: Bounds,
    width: int,
) -> tuple[_Bucket, bool]:
    near = {u for number in pairs for u in cost.pairs[number]}
    near.update(u for child in children for u in buckets[child].scope)
    scope = tuple(sorted(near - {v}))
    fronts: dict[tuple[int, ...], Front] = {}
    complete = True
    for at in itertools.product(*(range(len(cost.unary[u])) for u in scope)):
        where = dict(zip(scope, at, strict=True))
        costs, sizes = (_local(p, v, pairs, where) for p in (cost, size))
        parts = []
        for x in range(len(costs)):
            where[v] = x
            part = _combine(float(costs[x]), float(sizes[x]), x, children, buckets, where)
            if part is not None:
                parts.append(part)
        front = _united(parts, len(children))
        front, whole = _useful(front, v, scope, at, bounds, width)
        complete &= whole
        fronts[at] = front
    return _Bucket(v, scope, tuple(children), fronts), complete


def _local(problem: Pairwise, v: int, pairs: list[int], where: dict[int, int]) -> Array:
    """What each choice of v costs with its later neighbours held."""
    row = problem.unary[v]
    for number in pairs:
        u = next(end for end in problem.pairs[number] if end != v)
        row = row + problem.seen_from(number, v)[:, where[u]]
    return row


def _combine(
    cost: float,
    size: float,
    x: int,
    children: list[int],
    buckets: dict[int, _Bucket],
    where: dict[int, int],
) -> Front | None:
    """All sums of one pair from each child, on top of a fixed cost and size."""
    costs, sizes, behind = np.array([cost]), np.array([size]), np.zeros((1, 0), np.int64)
    for child in children:
        bucket = buckets[child]
        front = bucket.fronts[tuple(where[u] for u in bucket.scope)]
        if not len(front.cost):
            return None
        costs = (costs[:, None] + front.cost).reshape(-1)
        sizes = (sizes[:, None] + front.bytes).reshape(-1)
        old, new = np.divmod(np.arange(len(costs)), len(front.cost))
        behind = np.concatenate([behind[old], new[:, None]], axis=1)
        kept = _undominated(costs, sizes)
        costs, sizes, behind = costs[kept], sizes[kept], behind[kept]
    return Front(costs, sizes, np.full(len(costs), x), behind)


def _united(parts: list[Front], children: int) -> Front:
    if not parts:
        empty = np.zeros(0)
        return Front(empty, empty, np.zeros(0, np.int64), np.zeros((0, children), np.int64))
    cost, size = (np.concatenate([getattr(p, f) for p in parts]) for f in ("cost", "bytes"))
    choice, behind = (np.concatenate([getattr(p, f) for p in parts]) for f in ("choice", "behind"))
    kept = _undominated(cost, size)
    return Front(cost[kept], size[kept], choice[kept], behind[kept])


def _undominated(cost: Array, size: Array) -> Ints:
    """Pairs that no other beats in both, by rising cost."""
    if len(cost) == 1:
        return np.zeros(1, np.int64)
    order = np.lexsort((size, cost))
    sizes = size[order]
    lowest = np.minimum.accumulate(sizes)
    better = np.ones(len(order), dtype=bool)
    better[1:] = sizes[1:] < lowest[:-1]
    return order[better]


def _useful(
    front: Front, v: int, scope: tuple[int, ...], at: tuple[int, ...], bounds: Bounds, width: int
) -> tuple[Front, bool]:
    """The pairs that can still be part of a better choice, at most `width` of them."""
    held = dict(zip(scope, at, strict=True))
    outside = _outside(bounds.blend, v, held) - bounds.weight * bounds.limit
    value = front.cost + bounds.weight * front.bytes + outside
    slack = 1e-12 * max(abs(bounds.best), 1.0)
    keep = value < bounds.best - slack
    keep &= front.bytes + _outside(bounds.smallest, v, held) <= bounds.limit * (1 + 1e-12)
    kept = np.flatnonzero(keep)
    whole = len(kept) <= width
    if not whole:
        kept = np.sort(kept[np.argsort(value[kept], kind="stable")[:width]])
    return Front(front.cost[kept], front.bytes[kept], front.choice[kept], front.behind[kept]), whole


def _outside(marginals: Marginals, v: int, held: dict[int, int]) -> float:
    factor = marginals.outside[v]
    return float(factor.table[tuple(held[u] for u in factor.scope)])


def _choose(buckets: dict[int, _Bucket], roots: list[int], bounds: Bounds) -> list[int] | None:
    """The cheapest sum of one pair from each root that fits, traced back to choices."""
    top = _combine(0.0, 0.0, 0, roots, buckets, {})
    if top is None:
        return None
    fits = np.flatnonzero(top.bytes <= bounds.limit)
    if not fits.size:
        return None
    best = fits[np.argmin(top.cost[fits])]
    choice = [0] * len(buckets)
    stack = list(zip(roots, top.behind[best].tolist(), strict=True))
    while stack:
        v, which = stack.pop()
        bucket = buckets[v]
        front = bucket.fronts[tuple(choice[u] for u in bucket.scope)]
        choice[v] = int(front.choice[which])
        stack += list(zip(bucket.children, front.behind[which].tolist(), strict=True))
    return choice if math.isfinite(top.cost[best]) else None
