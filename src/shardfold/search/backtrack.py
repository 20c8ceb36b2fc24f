"""Back-substitution: from the choices that folding left to those of all eliminated vertices."""

from __future__ import annotations

import numpy as np

from shardfold.search.interning import Array, Ints
from shardfold.search.repeats import cuts
from shardfold.search.table_store import Blocks, Folding, Group, Rows, Steps, Store


def unfold(folding: Folding, choice: Ints) -> Rows | None:
    """Fill in `choice`, last eliminated first; contexts and what was left are already chosen.

    The blocks of a run, if one was folded away, are returned by what they chose.
    """
    store, at = folding.store, tuple(int(choice[v]) for v in reversed(folding.contexts))
    rows = None
    for group in reversed(folding.groups):
        if isinstance(group, Steps):
            _decide_steps(store, group, choice)
        elif isinstance(group, Blocks):
            rows = _decide_blocks(store, group, choice)
        else:
            near = [choice[neighbour] for neighbour in group.neighbours]
            choice[group.members] = _decide(store, group, near, at)
    return rows


def _decide_blocks(store: Store, blocks: Blocks, choice: Ints) -> Rows:
    """Decide a block once for each distinct pair of choices at its two joints.

    Of pieces with the same choice at both ends one is decided, and its blocks are repeated.
    """
    run, joints = blocks.run, _joints(store, blocks, choice)
    base = len(store.vertices[blocks.vertex])
    code = joints[:-1] * base + joints[1:]
    cases = _distinct(code, base * base)
    which = _looked_up(cases, np.arange(len(cases)), code)
    rows = _rows(store, blocks, cases // base, cases % base)
    chosen, counts = rows[:, 1:][which], np.bincount(which)
    mine = choice[run.begin : run.end].reshape(run.copies, run.period)
    piece, skipped = blocks.piece, blocks.spare * blocks.piece
    mine[:piece], mine[piece + skipped :] = chosen[:piece], chosen[piece:]
    if skipped:
        second = slice(piece, 2 * piece)
        mine[piece : piece + skipped].reshape(-1, piece, run.period)[:] = chosen[second]
        counts += blocks.spare * np.bincount(which[second], minlength=len(cases))
    return Rows(run, rows, counts)


def _rows(store: Store, blocks: Blocks, left: Ints, right: Ints) -> Ints:
    """The choice of the left joint and of a block, for each pair of choices at its joints."""
    run, inside = blocks.run, blocks.inside
    place = np.maximum(inside.ids - run.begin + 1, 0).tolist()
    rows = np.zeros((run.period + 1, len(left)), np.int64)
    rows[0], rows[run.joint + run.period - run.begin + 1] = left, right
    for v, vertex, a, towards_a, b, towards_b in reversed(inside.steps):
        cost = store.vertices[vertex]
        if a >= 0:
            cost = cost + store.edges[towards_a ^ 1].take(rows[place[a]], axis=0)
        if b >= 0:
            cost += store.edges[towards_b ^ 1].take(rows[place[b]], axis=0)
        rows[place[v]] = cost.argmin(axis=-1)
    return rows.T


def _joints(store: Store, blocks: Blocks, choice: Ints) -> Ints:
    """The choices of the joints of a run, without the spare pieces: halves between known ends."""
    run, spare = blocks.run, blocks.spare * blocks.piece
    short = run.copies - spare
    joints, at = np.zeros(short + 1, np.int64), cuts(blocks)
    ends = choice[run.joint + at * run.period]
    if blocks.steady.size:
        table = store.edges[blocks.powers[-1]]
        cost = table[ends[0], blocks.steady] + blocks.staying + table[blocks.steady, ends[1]]
        joints[:] = blocks.steady[cost.argmin()]
    joints[np.maximum(at - spare, 0)] = ends
    for k in reversed(range(len(blocks.powers) - 1)):
        half, end = 1 << k, short >> k + 1 << k + 1
        power = blocks.powers[k]
        near = [joints[0 : end : 2 * half], joints[2 * half : end + 1 : 2 * half]]
        group = Group(blocks.vertex, (power ^ 1, power), joints, ())
        joints[half : end : 2 * half] = _decide(store, group, near, ())
    return joints


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
