"""Min-marginals, and exact search under a memory limit by Pareto fronts of (cost, bytes).

Min-marginals: the least total cost for every choice of every variable.
Elimination along an order leaves a tree of buckets. Going back from the last,

    O_v[N(v)] = cheapest cost of everything outside v's part of the tree, given N(v)

so bucket v's tables plus O_v, minimised over all but v, are the exact cost of the best choice with
v held at each value. Work and memory: about three times the elimination, joint tables included.

Exact search under a memory limit: elimination whose table entries are Pareto fronts.

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
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardfold.search.elimination import Factor, Factors, Pairwise, join, spread
from shardfold.search.interning import Array, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Marginals:
    """Per variable the cost of the best choice at each value, and O_v as a factor over N(v)."""

    best: tuple[Array, ...]
    outside: dict[int, Factor]


def marginals(factors: Factors, order: Sequence[int]) -> Marginals:
    """Exact min-marginals of every variable."""
    position = {v: i for i, v in enumerate(order)}
    own: dict[int, list[Factor]] = {v: [] for v in order}
    constant = 0.0
    for factor in factors.factors:
        if factor.scope:
            own[min(factor.scope, key=position.__getitem__)].append(factor)
        else:
            constant += float(factor.table)
    children: dict[int, list[tuple[int, Factor]]] = {v: [] for v in order}
    scopes: dict[int, tuple[int, ...]] = {}
    roots: list[tuple[int, float]] = []
    for v in order:
        mine = own[v] + [message for _, message in children[v]]
        scopes[v] = tuple(sorted({u for f in mine for u in f.scope if u != v}))
        message = Factor(scopes[v], join(mine, scopes[v], v, factors.sizes), -1)
        if scopes[v]:
            children[min(scopes[v], key=position.__getitem__)].append((v, message))
        else:
            roots.append((v, float(message.table)))
    total = constant + sum(value for _, value in roots)
    outside = {v: Factor((), np.asarray(total - value), -1) for v, value in roots}
    best: list[Array] = [np.zeros(0)] * len(factors.sizes)
    for v in reversed(order):
        whole = (*scopes[v], v)
        shape = tuple(factors.sizes[u] for u in whole)
        joint = np.zeros(shape) + spread(outside[v], whole)
        for factor in own[v] + [message for _, message in children[v]]:
            joint += spread(factor, whole)
        best[v] = joint.min(axis=tuple(range(len(whole) - 1)))
        for child, message in children[v]:
            gone = tuple(axis for axis, u in enumerate(whole) if u not in message.scope)
            rest = joint - spread(message, whole)
            kept = tuple(u for u in whole if u in message.scope)
            outside[child] = Factor(kept, np.asarray(rest.min(axis=gone)), -1)
    return Marginals(tuple(best), outside)


_SUMS = 64
"""Sums made at a time, as a multiple of the width that fronts are cut to."""

_CALL = 100
"""What combining two fronts costs at least, in sums."""


@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """Pairs by rising cost and falling bytes, with the choice and the child pairs behind each."""

    cost: Array
    bytes: Array
    choice: Ints
    behind: Ints


@dataclass(slots=True, eq=False)
class Bounds:
    """What makes a pair useless: the limit, the best cost known, and costs outside by bucket.

    `sums_left` counts down; at zero the search gives up, about a second after it began.
    """

    limit: float
    best: float
    weight: float
    blend: Marginals
    smallest: Marginals
    sums_left: int = 6_000_000


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
        if bounds.sums_left < 0:
            return None, False
        complete &= whole
        buckets[v] = bucket
        if bucket.scope:
            waiting[min(bucket.scope, key=position.__getitem__)].append(v)
        else:
            roots.append(v)
    choice, whole = _choose(buckets, roots, bounds, width)
    return choice, complete and whole


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
        if bounds.sums_left < 0:
            return _Bucket(v, scope, tuple(children), fronts), False
        where = dict(zip(scope, at, strict=True))
        costs, sizes = (_local(p, v, pairs, where) for p in (cost, size))
        parts = []
        for x in range(len(costs)):
            where[v] = x
            start = float(costs[x]), float(sizes[x])
            behind = [_front(buckets[child], where) for child in children]
            part, whole = _combine(start, x, behind, bounds, width)
            complete &= whole
            parts.append(part)
        front = _united(parts)
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


def _front(bucket: _Bucket, where: dict[int, int]) -> Front:
    return bucket.fronts[tuple(where[u] for u in bucket.scope)]


def _combine(
    start: tuple[float, float],
    x: int,
    children: list[Front],
    bounds: Bounds,
    width: int,
    prune: bool = False,
) -> tuple[Front, bool]:
    """All sums of one pair from each child, on top of a fixed cost and size; whether really all.

    To `prune` is to drop sums that cannot beat the best, where the children are all there is.
    """
    ahead = [float((f.cost + bounds.weight * f.bytes).min(initial=np.inf)) for f in children]
    costs, sizes = np.array([start[0]]), np.array([start[1]])
    behind, whole = np.zeros((1, 0), np.int64), True
    for number, front in enumerate(children):
        most = max(1, _SUMS * width // max(len(front.cost), 1))
        if len(costs) > most:
            kept, whole = np.argsort(costs + bounds.weight * sizes, kind="stable")[:most], False
            costs, sizes, behind = costs[kept], sizes[kept], behind[kept]
        bounds.sums_left -= len(costs) * len(front.cost) + _CALL
        costs = (costs[:, None] + front.cost).reshape(-1)
        sizes = (sizes[:, None] + front.bytes).reshape(-1)
        kept = _undominated(costs, sizes)
        if prune:
            value = costs[kept] + bounds.weight * sizes[kept] + sum(ahead[number + 1 :])
            kept = kept[value < bounds.best + bounds.weight * bounds.limit]
        old, new = np.divmod(kept, max(len(front.cost), 1))
        costs, sizes = costs[kept], sizes[kept]
        behind = np.concatenate([behind[old], new[:, None]], axis=1)
    return Front(costs, sizes, np.full(len(costs), x), behind), whole


def _united(parts: list[Front]) -> Front:
    cost, size = (np.concatenate([getattr(p, f) for p in parts]) for f in ("cost", "bytes"))
    choice, behind = (np.concatenate([getattr(p, f) for p in parts]) for f in ("choice", "behind"))
    kept = _undominated(cost, size)
    return Front(cost[kept], size[kept], choice[kept], behind[kept])


def _undominated(cost: Array, size: Array) -> Ints:
    """Pairs that no other beats in both, by rising cost."""
    if len(cost) <= 1:
        return np.arange(len(cost))
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


def _choose(
    buckets: dict[int, _Bucket], roots: list[int], bounds: Bounds, width: int
) -> tuple[list[int] | None, bool]:
    """The cheapest sum of one pair from each root that fits, traced back; whether all were tried.

    Parts of the problem that share nothing meet only here, and may be many: a sum that even the
    best of the parts still to come cannot make good is dropped at once.
    """
    fronts = {root: buckets[root].fronts[()] for root in roots}
    if not all(len(front.cost) for front in fronts.values()):
        return None, True
    many = [root for root in roots if len(fronts[root].cost) > 1]
    alone = set(roots) - set(many)
    start = (
        sum(float(fronts[root].cost[0]) for root in alone),
        sum(float(fronts[root].bytes[0]) for root in alone),
    )
    top, whole = _combine(start, 0, [fronts[root] for root in many], bounds, width, prune=True)
    fits = np.flatnonzero(top.bytes <= bounds.limit)
    if not fits.size:
        return None, whole
    best = int(fits[np.argmin(top.cost[fits])])
    which = dict.fromkeys(roots, 0) | dict(zip(many, top.behind[best].tolist(), strict=True))
    return _traced(buckets, which), whole


def _traced(buckets: dict[int, _Bucket], which: dict[int, int]) -> list[int]:
    """The choices behind one pair of each root."""
    choice = [0] * len(buckets)
    stack = list(which.items())
    while stack:
        v, number = stack.pop()
        bucket = buckets[v]
        front = bucket.fronts[tuple(choice[u] for u in bucket.scope)]
        choice[v] = int(front.choice[number])
        stack += zip(bucket.children, front.behind[number].tolist(), strict=True)
    return choice
