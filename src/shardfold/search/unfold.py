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
        cases = _distinct(near, first.shape[1])
        return _looked_up(cases, (cost + first.T[cases]).argmin(axis=1), near)
    second, other = given(store.edges[group.edges[1]], at, 2), choice[group.neighbours[1]]
    if len(near) == 1:
        return np.add(cost, first[:, near[0]] + second[:, other[0]]).argmin()
    columns = second.shape[1]
    code = near * columns
    code += other
    cases = _distinct(code, first.shape[1] * columns)
    a, b = np.divmod(cases, columns)
    return _looked_up(cases, (cost + first.T[a] + second.T[b]).argmin(axis=1), code)


def _distinct(code: Ints, limit: int) -> Ints:
    """Distinct codes below `limit`, ascending; without sorting where there are many."""
    if limit > 16 * len(code):
        return np.unique(code)
    seen = np.zeros(limit, dtype=bool)
    seen[code] = True
    return np.flatnonzero(seen)


def _looked_up(cases: Ints, best: Ints, code: Ints) -> Ints:
    """The best choice of each code, given that of each case."""
    if cases[-1] > 16 * len(code):
        return best.take(np.searchsorted(cases, code))
    of_case = np.empty(int(cases[-1]) + 1, dtype=np.int64)
    of_case[cases] = best
    return of_case.take(code)


def given(table: Array, at: tuple[int, ...], own: int) -> Array:
    """`table` with its leading axes fixed at `at`; it may have fewer of them, or of length 1."""
    leading = table.ndim - own
    if not leading:
        return table
    lengths = table.shape[:leading]
    where = at[len(at) - leading :]
    index = tuple(i if length > 1 else 0 for i, length in zip(where, lengths, strict=True))
    return np.asarray(table[index])
