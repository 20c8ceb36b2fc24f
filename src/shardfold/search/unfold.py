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


def _decide(store: Store, group: Group, choice: Ints, at: tuple[int, ...]) -> Ints:
    """The best choice of every member given its neighbours', each distinct case once."""
    cost = given(store.vertices[group.vertex], at, 1)
    if not group.edges:
        return np.full(len(group.members), int(np.argmin(cost)))
    tables = [given(store.edges[edge], at, 2) for edge in group.edges]
    near = choice[group.neighbours]
    if len(near) == 1:
        case = near[0].tolist()
        best = cost + tables[0][:, case[0]]
        if len(case) == 2:
            best = best + tables[1][:, case[1]]
        return np.asarray([np.argmin(best)])
    code = near[:, 0] if len(tables) == 1 else near[:, 0] * tables[1].shape[1] + near[:, 1]
    cases, which = _distinct(code, int(np.prod([t.shape[1] for t in tables])))
    if len(tables) == 1:
        joint = cost + tables[0].T[cases]
    else:
        a, b = np.divmod(cases, tables[1].shape[1])
        joint = cost + tables[0].T[a] + tables[1].T[b]
    return np.asarray(joint.argmin(axis=1)[which])


def _distinct(code: Ints, limit: int) -> tuple[Ints, Ints]:
    """Distinct codes below `limit`, and which one each is; without sorting where there are many."""
    if limit > 16 * len(code):
        cases, which = np.unique(code, return_inverse=True)
        return cases, which
    seen = np.zeros(limit, dtype=bool)
    seen[code] = True
    number = np.cumsum(seen) - 1
    return np.flatnonzero(seen), number[code]


def given(table: Array, at: tuple[int, ...], own: int) -> Array:
    """`table` with its leading axes fixed at `at`; it may have fewer of them, or of length 1."""
    leading = table.ndim - own
    if not leading:
        return table
    lengths = table.shape[:leading]
    where = at[len(at) - leading :]
    return table[tuple(i if length > 1 else 0 for i, length in zip(where, lengths, strict=True))]
