"""The way back: given the choices of what folding left, the choices of all it eliminated."""

from __future__ import annotations

import numpy as np

from shardfold.search.fold import Folding, Group
from shardfold.search.kinds import Array, Ints
from shardfold.search.store import Store


def unfold(folding: Folding, choice: Ints) -> None:
    """Fill in `choice`, last eliminated first; contexts and what was left are already chosen."""
    at = tuple(int(choice[vertex]) for vertex in reversed(folding.contexts))
    for group in reversed(folding.groups):
        choice[group.members] = _decide(folding.store, group, choice, at)


def _decide(store: Store, group: Group, choice: Ints, at: tuple[int, ...]) -> Ints | np.intp:
    """The best choice of every member given its neighbours', each distinct case once."""
    cost = given(store.vertices[group.vertex], at, 1)
    if not group.edges:
        return cost.argmin()
    first, near = given(store.edges[group.edges[0]], at, 2), choice[group.neighbours[0]]
    if len(group.edges) == 1:
        if len(near) == 1:
            return np.add(cost, first[:, near[0]]).argmin()
        cases, which = _distinct(near, first.shape[1])
        return np.take((cost + first.T[cases]).argmin(axis=1), which)
    second, other = given(store.edges[group.edges[1]], at, 2), choice[group.neighbours[1]]
    if len(near) == 1:
        return np.add(cost, first[:, near[0]] + second[:, other[0]]).argmin()
    columns = second.shape[1]
    cases, which = _distinct(near * columns + other, first.shape[1] * columns)
    a, b = np.divmod(cases, columns)
    return np.take((cost + first.T[a] + second.T[b]).argmin(axis=1), which)


def _distinct(code: Ints, limit: int) -> tuple[Ints, Ints]:
    """Distinct codes below `limit`, and which one each is; without sorting where there are many."""
    if limit > 16 * len(code):
        cases, which = np.unique(code, return_inverse=True)
        return cases, which
    seen = np.zeros(limit, dtype=bool)
    seen[code] = True
    number = np.cumsum(seen) - 1
    return np.flatnonzero(seen), number.take(code)


def given(table: Array, at: tuple[int, ...], own: int) -> Array:
    """`table` with its leading axes fixed at `at`; it may have fewer of them, or of length 1."""
    leading = table.ndim - own
    if not leading:
        return table
    lengths = table.shape[:leading]
    where = at[len(at) - leading :]
    index = tuple(i if length > 1 else 0 for i, length in zip(where, lengths, strict=True))
    return np.asarray(table[index])
