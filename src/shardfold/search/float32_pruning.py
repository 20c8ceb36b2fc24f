"""A rough search in single precision that leaves only the choices that can be best.

Products of large tables are most of an exact search, and in single precision they take half as
long. So a problem that folds away entirely is folded roughly first. On the way back every vertex
keeps, instead of its best choice, each that may be best given some of those its neighbours keep:

    c[v] + l[v, a] + r[v, b] <= (1 + slack) * the least of them over v

A best choice of all has the least sum at every vertex, so it is kept if `slack` covers what
rounding can have done. Tables are first brought to a least entry of zero: sums of numbers that are
not negative have a small relative error, however much they differ. One or a few choices a vertex
are left (616 of 60,493 for InceptionV3 on 8 devices), and the best among them is the best of all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from shardfold.search.fold import FEW, one_by_one, start
from shardfold.search.interning import Array, Ints
from shardfold.search.problem import Problem
from shardfold.search.repeats import find_run
from shardfold.search.table_store import Folding, Steps, Store

_HEAVY = 1e8
"""Joint entries, about, from which a rough search first is faster."""

_VARIED = 80
"""Distinct edge tables from which it is used. Networks of equal blocks have fewer at any depth; a
long run of them is not searched roughly, so neither is a short one: time should not jump."""

_ROUNDINGS = 4
"""How often a sum is rounded at most, for each vertex and each edge: once as its table is rounded,
twice as the vertex is eliminated, and once as the edge that it leaves is added to another."""

_LARGEST = 1e30
"""Costs that single precision can add up; its range ends at 3e38."""

_TINY = np.float32(1e-33)
"""More than all sums together can lose at the small end of the range, which is 1e-38."""

_MANY = 1 << 22
"""Sums of one vertex that are worth looking at; with more it keeps all its choices."""


@dataclass(frozen=True, slots=True, eq=False)
class Narrowed:
    """A problem with fewer choices: which of the original ones each class of vertices keeps."""

    problem: Problem
    of: Ints
    kept: Sequence[Ints]
    largest: int
    peak_bytes: int

    def original(self, choice: Ints) -> Ints:
        """A choice among fewer as one among all."""
        chosen = zip(self.of.tolist(), choice.tolist(), strict=True)
        return np.array([self.kept[kind][x] for kind, x in chosen], dtype=np.int64)


def narrowed(problem: Problem) -> Narrowed | None:
    """The problem with the choices that can be best; None where finding them would not pay."""
    if not (_is_heavy(problem) and _folds_away(problem) and _can_be_rough(problem)):
        return None
    store = Store(_rough(problem.vertex_kinds.tables), _rough(problem.edge_kinds.tables))
    folding = start(problem, store, np.arange(len(problem)), slice(None), [])
    one_by_one(folding)
    sets, which = _candidates(folding, len(problem.edges))
    code = problem.vertex_kinds.of * len(sets) + which
    _, first, of = np.unique(code, return_index=True, return_inverse=True)
    kept = [sets[number] for number in which[first].tolist()]
    small = problem.narrowed(of.reshape(-1), first, kept)
    return Narrowed(small, of.reshape(-1), kept, store.largest, 4 * store.new_entries)


def _is_heavy(problem: Problem) -> bool:
    """Whether products of tables like these take longer than looking at the problem twice."""
    tables = problem.edge_kinds.tables
    if len(problem) > FEW or len(tables) < _VARIED:
        return False
    work = sum(math.sqrt(table.size) * table.size for table in tables)
    return work >= _HEAVY and find_run(problem) is None


def _can_be_rough(problem: Problem) -> bool:
    """Whether no sum of costs leaves the range of single precision."""
    vertices, edges = problem.vertex_kinds.tables, problem.edge_kinds.tables
    most = max(float(max(table.max(), -table.min())) for table in vertices + edges)
    return most * 2 * (len(problem) + len(problem.edges)) < _LARGEST


def _folds_away(problem: Problem) -> bool:
    """Whether no vertex is left when those with at most two neighbours go, one after the other."""
    near: list[set[int]] = [set() for _ in range(len(problem))]
    for u, v in problem.ends.tolist():
        near[u].add(v)
        near[v].add(u)
    ready, gone = [v for v, others in enumerate(near) if len(others) <= 2], 0
    while ready:
        v = ready.pop()
        others, near[v] = near[v], set()
        gone += 1
        for u in others:
            before = len(near[u])
            near[u] |= others
            near[u] -= {u, v}
            if len(near[u]) <= 2 < before:
                ready.append(u)
    return gone == len(near)


def _rough(tables: Sequence[Array]) -> list[Array]:
    """The tables in single precision, their least entry at zero."""
    # All that is done with them serves both precisions; the types know one.
    return [cast(Array, np.subtract(t, t.min(), dtype=np.float64).astype("f4")) for t in tables]


def _candidates(folding: Folding, edges: int) -> tuple[list[Ints], Ints]:
    """Sets of choices, and for each vertex the number of the set that it keeps."""
    (steps,) = [group for group in folding.groups if isinstance(group, Steps)]
    rounding = _ROUNDINGS * (len(steps.steps) + edges) * float(np.finfo(np.float32).eps)
    slack = np.float32(1 + 4 * rounding)  # both sides of the comparison are rounded
    sets: list[Ints] = []
    numbers: dict[bytes, int] = {}
    known: dict[tuple[int, ...], int] = {}
    which = [-1] * len(steps.steps)
    for v, vertex, a, left, b, right in reversed(steps.steps):
        case = vertex, left, which[a] if a >= 0 else -1, right, which[b] if b >= 0 else -1
        if case not in known:
            keeps = _near_least(folding.store, case, sets, slack)
            known[case] = numbers.setdefault(keeps.tobytes(), len(sets))
            if known[case] == len(sets):
                sets.append(keeps)
        which[v] = known[case]
    return sets, np.array(which, dtype=np.int64)


def _near_least(
    store: Store, case: tuple[int, ...], sets: Sequence[Ints], slack: np.float32
) -> Ints:
    """The choices of a vertex that are least, or nearly, for some choices of its neighbours."""
    vertex, left, near_left, right, near_right = case
    row = store.vertices[vertex]
    size = row.size
    for edge, near in ((left, near_left), (right, near_right)):
        if near >= 0:
            if row.size * len(sets[near]) > _MANY:
                return np.arange(size)
            row = (row.reshape(-1, 1, size) + store.edges[edge ^ 1][sets[near]]).reshape(-1, size)
    rows = row.reshape(-1, size)
    least = np.minimum.reduce(rows, axis=1, keepdims=True)
    return np.flatnonzero((rows <= least * slack + _TINY).any(axis=0))
