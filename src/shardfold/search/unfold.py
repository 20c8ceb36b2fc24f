"""The way back: given the choices of what folding left, the choices of all it eliminated."""

from __future__ import annotations

import numpy as np

from shardfold.search.groups import Blocks, Folding, Group, Steps
from shardfold.search.kinds import Array, Ints
from shardfold.search.store import Store


def unfold(folding: Folding, choice: Ints) -> None:
    """Fill in `choice`, last eliminated first; contexts and what was left are already chosen."""
    store, at = folding.store, tuple(int(choice[v]) for v in reversed(folding.contexts))
    for group in reversed(folding.groups):
        if isinstance(group, Steps):
            _decide_steps(store, group, choice)
        elif isinstance(group, Blocks):
            _decide_blocks(store, group, choice, at)
        else:
            near = [choice[neighbour] for neighbour in group.neighbours]
            choice[group.members] = _decide(store, group, near, at)


def _decide_blocks(store: Store, blocks: Blocks, choice: Ints, at: tuple[int, ...]) -> None:
    """Decide a block once for each distinct pair of choices at its two joints."""
    period, length = blocks.period, blocks.copies * blocks.period
    left = choice[blocks.joint : blocks.joint + length : period]
    right = choice[blocks.joint + period : blocks.joint + period + length : period]
    base = int(right.max()) + 1
    code = left * base + right
    cases = _distinct(code, (int(left.max()) + 1) * base)
    which = _looked_up(cases, np.arange(len(cases)), code)
    chosen = {blocks.joint: cases // base, blocks.joint + period: cases % base}
    ids = blocks.inside.ids.tolist()
    for v, vertex, a, edge_a, b, edge_b in reversed(blocks.inside.steps):
        edges = (edge_a, edge_b)[: (a >= 0) + (b >= 0)]
        near = [chosen[ids[u]] for u in (a, b)[: len(edges)]]
        member = ids[v]
        group = Group(vertex, edges, np.array([member]), ())
        best = np.broadcast_to(_decide(store, group, near, at), len(cases))
        chosen[member] = best
        choice[member : member + length : period] = best.take(which)


def _decide_steps(store: Store, steps: Steps, choice: Ints) -> None:
    """Decide one vertex after the other, each distinct case once."""
    vertices, edges = store.vertices, store.edges
    chosen = choice[steps.ids].tolist()
    known: dict[tuple[int, ...], int] = {}
    for v, vertex, a, left, b, right in reversed(steps.steps):
        x, y = chosen[a], chosen[b]
        case = vertex, left, x, right, y
        best = known.get(case)
        if best is None:
            row = vertices[vertex]
            if a >= 0:
                row = row + edges[left ^ 1][x]
                if b >= 0:
                    row += edges[right ^ 1][y]
            best = known[case] = int(row.argmin())
        chosen[v] = best
    choice[steps.ids] = chosen


def _decide(store: Store, group: Group, near: list[Ints], at: tuple[int, ...]) -> Ints | np.intp:
    """The best choice of every member given its neighbours', each distinct case once."""
    cost = given(store.vertices[group.vertex], at, 1)
    if not group.edges:
        return cost.argmin()
    first = given(store.edges[group.edges[0]], at, 2)
    if len(group.edges) == 1:
        if len(near[0]) == 1:
            return np.add(cost, first[:, near[0][0]]).argmin()
        cases = _distinct(near[0], first.shape[1])
        return _looked_up(cases, (cost + first.T[cases]).argmin(axis=1), near[0])
    second = given(store.edges[group.edges[1]], at, 2)
    if len(near[0]) == 1:
        return np.add(cost, first[:, near[0][0]] + second[:, near[1][0]]).argmin()
    columns = second.shape[1]
    code = near[0] * columns + near[1]
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
