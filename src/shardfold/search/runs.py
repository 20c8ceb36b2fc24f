"""Runs: the same block again and again, found by its numbering and replaced by one table.

Where vertices v and v + P, and edges e and e + Q, are alike over a long stretch, the stretch is L
copies of a block of P vertices. If all that a block shares with the next is one vertex z, then

    M[z, z'] = min over the inside of a block of everything between z and z'

is computed once by folding, and the stretch is the min-plus power M^L, by halving: log2(L)
products. The vertices inside are recovered together, block by block at once.

Rounds of folding alone find the same answer from any numbering, and touch every vertex several
times; this touches each a few times less, which matters from some ten thousand vertices on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardfold.search.few import one_by_one
from shardfold.search.fold import start
from shardfold.search.groups import Blocks, Folding, Group, Steps
from shardfold.search.kinds import Ints, Mask
from shardfold.search.problem import Problem
from shardfold.search.store import Store

_MIN_VERTICES = 1_000
_MIN_COPIES = 8
_MAX_PERIODS = 32


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Blocks 0..copies-1, each between two joints: block t between joint + (t and t + 1) * period.

    `inside` and `edges` are the vertices and edges of block 0; `body` marks what lies strictly
    between the first joint and the last, and `touched` the edges that end there.
    """

    period: int
    copies: int
    joint: int
    inside: Ints
    edges: Ints
    body: Mask
    touched: Mask


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """One block: the joint before it, the vertices inside, and its edges."""

    joint: int
    inside: Ints
    edges: Ints


def find_run(problem: Problem) -> Run | None:
    """The run through the middle of the problem, or None where there is none worth having."""
    if len(problem) < _MIN_VERTICES or len(problem.edges) < _MIN_VERTICES:
        return None
    kind = problem.vertex_kinds.of
    middle = len(problem) // 2
    window = kind[middle : middle + len(problem) // (2 * _MIN_COPIES)]
    for period in (np.flatnonzero(window[1:] == window[0])[:_MAX_PERIODS] + 1).tolist():
        low, high = _stretch(kind[period:] == kind[:-period], middle)
        if high - low >= _MIN_COPIES * period:
            return _cut(problem, period, low, high + period)
    return None


def _stretch(alike: Mask, middle: int) -> tuple[int, int]:
    """The largest range around `middle` on which `alike` holds."""
    if not alike[middle]:
        return middle, middle
    before = np.flatnonzero(~alike[:middle])
    after = np.flatnonzero(~alike[middle:])
    low = int(before[-1]) + 1 if before.size else 0
    return low, middle + int(after[0]) if after.size else len(alike)


def _cut(problem: Problem, period: int, low: int, high: int) -> Run | None:
    """Fit blocks into the vertices low..high: edges must repeat too, and one joint must do."""
    ends, kinds = problem.ends, problem.edge_kinds.of
    middle = len(ends) // 2
    later = ends[middle : middle + len(ends) // (2 * _MIN_COPIES)] - ends[middle]
    at = np.flatnonzero((later[:, 0] == period) & (later[:, 1] == period))
    if not at.size:
        return None
    step = int(at[0])
    alike = kinds[step:] == kinds[:-step]
    alike &= ends[step:, 0] == ends[:-step, 0] + period
    alike &= ends[step:, 1] == ends[:-step, 1] + period
    first, last = _stretch(alike, middle)
    sample = np.arange(max(middle - 3 * step, first), min(middle + 3 * step, last + step))
    base = int(ends[middle].min())
    # Blocks that begin just after the stretch does leave the least over at its two ends.
    for begin in sorted(range(base - period, base), key=lambda b: (b - low - 1) % period):
        block = _block(problem, sample, begin, period)
        if block is not None:
            return _extend(problem, block, (period, step), (low, high), (first, last + step))
    return None


def _block(problem: Problem, sample: Ints, begin: int, period: int) -> _Block | None:
    """The block begin..begin+period-1 if it hangs on two joints only, one period apart."""
    ends = problem.ends[sample]
    lower, upper = ends.min(axis=1), ends.max(axis=1)
    joints = np.unique(lower[(lower < begin + period) & (upper >= begin + period)])
    if len(joints) != 1 or not begin <= joints[0] < begin + period:
        return None
    before, after = int(joints[0]) - period, int(joints[0])
    inside = np.arange(begin, begin + period)
    inside = inside[inside != after]
    within = (ends >= begin) & (ends < begin + period) & (ends != after)
    direct = (lower == before) & (upper == after)
    mine = within.any(axis=1) | direct
    if not (within | (ends == before) | (ends == after))[mine].all():
        return None
    return _Block(before, inside, sample[mine])


def _extend(
    problem: Problem,
    block: _Block,
    steps: tuple[int, int],
    vertices: tuple[int, int],
    edges: tuple[int, int],
) -> Run | None:
    """Repeat the block as far as vertices and edges allow, and check that nothing else is in it."""
    if not block.edges.size:
        return None
    period, step = steps
    lowest = min(block.joint, int(block.inside.min(initial=block.joint)))
    highest = max(block.joint + period, int(block.inside.max(initial=0)))
    back = min((lowest - vertices[0]) // period, (int(block.edges.min()) - edges[0]) // step)
    ahead = min(
        (vertices[1] - 1 - highest) // period, (edges[1] - 1 - int(block.edges.max())) // step
    )
    copies, joint = back + ahead + 1, block.joint - back * period
    if copies < _MIN_COPIES:
        return None
    inside = block.inside - back * period
    body = np.zeros(len(problem), dtype=bool)
    for vertex in inside.tolist():
        body[vertex : vertex + copies * period : period] = True
    body[joint + period : joint + copies * period : period] = True
    touched = body.take(problem.ends[:, 0]) | body.take(problem.ends[:, 1])
    if np.count_nonzero(touched) != copies * len(block.edges):
        return None
    return Run(period, copies, joint, inside, block.edges - back * step, body, touched)


def without_run(problem: Problem, store: Store, run: Run) -> Folding | None:
    """The problem with one edge in place of the run; None where a block does not fold to one."""
    kinds = problem.vertex_kinds.of
    before, last = run.joint, run.joint + run.copies * run.period
    block = _fold_block(problem, store, run)
    if block is None:
        return None
    (inside,) = [group for group in block.groups if isinstance(group, Steps)]
    blocks = Blocks(inside, run.period, run.copies, run.joint)
    opening, closing = int(block.kind[0]), int(block.kind[1])
    inner = store.add_vertices(int(kinds[before + run.period]), opening)
    inner = store.add_vertices(inner, closing)
    power, halvings = _power(store, int(block.edge_kind[0]), inner, run)
    ids, edges = np.flatnonzero(~run.body), np.flatnonzero(~run.touched)
    folding = start(problem, store, ids, edges, [blocks, *halvings])
    ends = np.searchsorted(ids, [before, last])
    folding.ends = np.concatenate([folding.ends, ends[None]])
    folding.edge_kind = np.append(folding.edge_kind, power)
    folding.kind[ends[0]] = store.add_vertices(int(kinds[before]), opening)
    folding.kind[ends[1]] = store.add_vertices(int(kinds[last]), closing)
    return folding


def _fold_block(problem: Problem, store: Store, run: Run) -> Folding | None:
    """One block folded down to the edge between its joints; None if something else is left."""
    joints = run.joint, run.joint + run.period
    local = np.sort(np.concatenate([joints, run.inside]))
    block = start(problem, store, local, run.edges, [])
    block.locked = (local == joints[0]) | (local == joints[1])
    block.kind[block.locked] = store.zero(int(problem.vertex_kinds.of[run.joint]))
    one_by_one(block)
    return block if len(block.ids) == 2 and len(block.ends) == 1 else None


def _power(store: Store, edge: int, joint: int, run: Run) -> tuple[int, list[Group]]:
    """The table between the two ends of a chain of equal edges, and the eliminations behind it.

    P(2l) = P(l) P(l) and P(2l + 1) = P(2l) M: at most two products for each halving.
    """
    low, length = np.zeros(1, np.int64), run.copies
    splits: list[tuple[int, int, Ints]] = []
    while length > 1:
        left = length // 2 if length % 2 == 0 else length - 1
        splits.append((left, length, low))
        low = np.concatenate([low, low + left]) if left == length - left else low
        length = left
    table, groups = {1: edge}, list[Group]()
    for left, length, low in reversed(splits):
        pair = table[left] ^ 1, table[length - left]
        table[length] = store.bridge(joint, *pair)
        at = run.joint + low * run.period
        near = at, at + length * run.period
        groups.append(Group(joint, pair, at + left * run.period, near))
    return table[run.copies], groups
