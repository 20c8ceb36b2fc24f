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
        return np.argmin(cost)
    tables = [given(store.edges[edge], at, 2) for edge in group.edges]
    near = [_at(choice, neighbour) for neighbour in group.neighbours]
    if len(near[0]) == 1:
        rows = [table[:, int(x[0])] for table, x in zip(tables, near, strict=True)]
        return np.argmin(np.add(cost, sum(rows)))
    if len(tables) == 1:
        cases, which = _distinct(near[0], tables[0].shape[1])
        best = (cost + tables[0].T[cases]).argmin(axis=1)
        return np.take(best, which)
    columns = tables[1].shape[1]
    cases, which = _distinct(near[0] * columns + near[1], tables[0].shape[1] * columns)
    a, b = np.divmod(cases, columns)
    best = (cost + tables[0].T[a] + tables[1].T[b]).argmin(axis=1)
    return np.take(best, which)


def _at(choice: Ints, where: Ints | slice) -> Ints:
    return choice[where] if isinstance(where, slice) else choice.take(where)


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
