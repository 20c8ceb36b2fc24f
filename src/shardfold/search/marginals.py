"""How cheap the whole can be for every choice of every variable: elimination forth and back.

Elimination along an order leaves a tree of buckets. Going back from the last,

    O_v[N(v)] = cheapest cost of everything outside v's part of the tree, given N(v)

so bucket v's tables plus O_v, minimised over all but v, are the exact cost of the best choice with
v held at each value. Work and memory: about three times the elimination, joint tables included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardfold.search.eliminate import join
from shardfold.search.factors import Factor, Factors, spread
from shardfold.search.kinds import Array


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
