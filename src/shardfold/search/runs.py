"""Runs: the same block again and again, found by its numbering.

Where vertices v and v + P, and edges e and e + Q, are alike over a long stretch, the stretch is
copies of a block of P vertices and Q edges. What holds for one block then holds for each, so one
is looked at; it makes a run if all that it shares with the next is one vertex, their joint.

Every vertex and every edge is compared once with the one a block further on. Rounds of folding
find the same answer from any numbering, but touch each several times.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardfold.search.groups import Run
from shardfold.search.kinds import Ints, Mask
from shardfold.search.problem import Problem

_MIN_VERTICES = 1_000
_MIN_COPIES = 8
_MAX_PERIODS = 32

_PIECE = 1 << 14
"""Positions compared at a time, so that what lies between stays in cache."""

Range = tuple[int, int]


def find_run(problem: Problem) -> Run | None:
    """The run through the middle of the problem, or None where there is none worth having."""
    if len(problem) < _MIN_VERTICES or len(problem.edges) < _MIN_VERTICES:
        return None
    kind = problem.vertex_kinds.of
    middle = len(problem) // 2
    window = kind[middle : middle + len(problem) // (2 * _MIN_COPIES)]
    for period in (np.flatnonzero(window[1:] == window[0])[:_MAX_PERIODS] + 1).tolist():
        low, high = _stretch(_again(kind, period), middle, len(kind) - period)
        if high - low >= _MIN_COPIES * period:
            return _cut(problem, period, (low, high + period))
    return None


def _again(kind: Ints, period: int) -> Callable[[int, int], Mask]:
    """Whether each vertex of a range is like the one a period on."""
    return lambda low, high: kind[low + period : high + period] == kind[low:high]


def _edges_again(problem: Problem, period: int, step: int) -> Callable[[int, int], Mask]:
    """Whether each edge of a range is like the one a step on, which lies a period on."""
    kind, (source, target) = problem.edge_kinds.of, problem.ends.T

    def again(low: int, high: int) -> Mask:
        here, there = slice(low, high), slice(low + step, high + step)
        alike: Mask = kind[there] == kind[here]
        alike &= source[there] - source[here] == period
        alike &= target[there] - target[here] == period
        return alike

    return again


def _stretch(again: Callable[[int, int], Mask], middle: int, count: int) -> Range:
    """The largest range around `middle` on which `again` holds, read outwards in pieces."""
    low = high = middle
    while high < count:
        piece = again(high, min(high + _PIECE, count))
        if not piece.all():
            high += int(piece.argmin())
            break
        high += len(piece)
    while 0 < low < high:
        piece = again(max(low - _PIECE, 0), low)
        if not piece.all():
            low -= int(piece[::-1].argmin())
            break
        low -= len(piece)
    return low, high


def _cut(problem: Problem, period: int, vertices: Range) -> Run | None:
    """Fit blocks into a range of vertices: edges must repeat too, and one joint must do."""
    ends = problem.ends
    middle = len(ends) // 2
    later = ends[middle : middle + len(ends) // (2 * _MIN_COPIES)] - ends[middle]
    at = np.flatnonzero((later[:, 0] == period) & (later[:, 1] == period))
    if not at.size:
        return None
    step = int(at[0])
    first, last = _stretch(_edges_again(problem, period, step), middle, len(ends) - step)
    edges = first, last + step
    sample = np.arange(max(middle - 3 * step, first), min(middle + 3 * step, last + step))
    base = int(ends[middle].min())
    # Blocks that begin just after the stretch does leave the least over at its two ends.
    for begin in sorted(range(base - period, base), key=lambda b: (b - vertices[0] - 1) % period):
        block = _block(problem, sample, begin, period)
        # With as many edges in a block as in a step, there is no edge that belongs to none.
        if block is not None and len(block.edges) == step:
            return _extended(problem, block, vertices, edges)
    return None


def _block(problem: Problem, sample: Ints, begin: int, period: int) -> Run | None:
    """The block begin..begin+period-1 if it hangs on two joints only, one period apart."""
    ends = problem.ends[sample]
    lower, upper = ends.min(axis=1), ends.max(axis=1)
    joints = np.unique(lower[(lower < begin + period) & (upper >= begin + period)])
    if len(joints) != 1 or not begin <= joints[0] < begin + period:
        return None
    before, after = int(joints[0]) - period, int(joints[0])
    within = (ends >= begin) & (ends < begin + period) & (ends != after)
    direct = (lower == before) & (upper == after)
    mine = within.any(axis=1) | direct
    if not (within | (ends == before) | (ends == after))[mine].all():
        return None
    return Run(period, 1, before, begin, sample[mine])


def _extended(problem: Problem, block: Run, vertices: Range, edges: Range) -> Run | None:
    """The block repeated as far as vertices and edges allow, if no other edge ends in it."""
    period, step = block.period, len(block.edges)
    back = min((block.joint - vertices[0]) // period, (int(block.edges.min()) - edges[0]) // step)
    ahead = min(
        (vertices[1] - block.end) // period, (edges[1] - 1 - int(block.edges.max())) // step
    )
    copies, shift = back + ahead + 1, back * period
    if copies < _MIN_COPIES:
        return None
    run = Run(period, copies, block.joint - shift, block.begin - shift, block.edges - back * step)
    others = np.concatenate([problem.ends[: edges[0]], problem.ends[edges[1] :]])
    inside = (others >= run.begin) & (others < run.end) & (others != run.last)
    return None if inside.any() else run
