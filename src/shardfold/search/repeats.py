"""Runs: the same block again and again, found by its numbering.

Where vertices v and v + P, and edges e and e + Q, are alike over a long stretch, the stretch is
copies of a block of P vertices and Q edges. What holds for one block then holds for each, so one
is looked at; it makes a run if all that it shares with the next is one vertex, their joint.

Every vertex and every edge is compared once with the one a block further on. Rounds of folding
find the same answer from any numbering, but touch each several times.

A run of equal blocks folded to a few tables, and its cost added up by what the blocks chose.

With z and z' the joints before and after a block,

    M[z, z'] = min over the inside of a block of everything between z and z'

is computed once by folding. Squaring it gives the tables P between joints 2, 4, 8, ... blocks
apart. After a few squarings the joints between such pieces settle: only some choices S can be best,
and between two joints that take choices in S, a joint does best to take that of the first. Then the
way over n pieces from z to a joint z' that takes a choice in S costs

    min over w in S of P[z, w] + c[w] + (n - 2) (P[w, w] + c[w]) + P[w, z']

and at most that to any other z'. One more piece follows, so that z' is such a joint.
Else the squaring goes on: log2(L) products for a run of L blocks. A piece for each lower bit of L
follows. Nothing here grows with L but the choice itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardfold.search.fold import one_by_one, start
from shardfold.search.interning import Ints, Mask
from shardfold.search.minplus import product_of, undominated
from shardfold.search.problem import Problem
from shardfold.search.table_store import Blocks, Folding, Rows, Run, Steps, Store

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


_SETTLES = 4
"""Squarings within which joints settle, if they do."""

_ROUNDING = 1e-15
"""Part of a table's entries by which sums of the same numbers may differ."""

_TRIES = 2
"""Choices that are tried as those that beat others."""

_STATES = 8
"""Most choices that settled joints may have."""


def without_run(problem: Problem, store: Store, run: Run) -> Folding | None:
    """The problem with some edges in place of the run; None where a block does not fold to one."""
    block = _fold_block(problem, store, run)
    if block is None:
        return None
    (inside,) = [group for group in block.groups if isinstance(group, Steps)]
    opening, closing = int(block.kind[0]), int(block.kind[1])
    own = int(problem.vertex_kinds.of[run.joint])
    first, last = store.add_vertices(own, opening), store.add_vertices(own, closing)
    inner = store.add_vertices(first, closing)
    blocks, chain = _pieces(store, run, inside, inner, int(block.edge_kind[0]))
    joints = run.joint + run.period * cuts(blocks)
    ids = np.concatenate([np.arange(run.begin), joints[1:], np.arange(run.end, len(problem))])
    folding = start(problem, store, ids, edges_outside(run, len(problem.edges)), [blocks])
    at = np.searchsorted(ids, joints)
    folding.ends = np.concatenate([folding.ends, np.stack([at[:-1], at[1:]], axis=1)])
    folding.edge_kind = np.concatenate([folding.edge_kind, chain])
    folding.kind[at] = inner
    folding.kind[at[[0, -1]]] = first, last
    return folding


def _pieces(
    store: Store, run: Run, inside: Steps, joint: int, edge: int
) -> tuple[Blocks, list[int]]:
    """The run as pieces, and the edges between their ends that stand in for them."""
    powers, steady = [edge], np.zeros(0, np.int64)
    while run.copies >> len(powers):
        if len(powers) <= _SETTLES and run.copies >> len(powers) - 1 > 2:
            steady = _steady(store, joint, powers[-1])
        if steady.size:
            break
        powers.append(store.bridge(joint, powers[-1] ^ 1, powers[-1]))
    top, table, own = len(powers) - 1, store.edges[powers[-1]], store.vertices[joint][steady]
    staying = own + ((run.copies >> top) - 3) * (table[steady, steady] + own)
    chain = [powers[-1], *(powers[k] for k in reversed(range(top)) if run.copies >> k & 1)]
    if steady.size:
        across = product_of(table.T[steady] + staying[:, None], table[steady])
        chain.insert(0, store.edge(across))
    return Blocks(run, inside, joint, tuple(powers), steady, staying), chain


def _steady(store: Store, joint: int, edge: int) -> Ints:
    """The choices that the joints in a row of equal edges settle at; none where they do not.

    All others are dominated, and between two of these a joint does best to take the first.
    """
    onward = store.edges[edge]
    back = onward.T + store.vertices[joint][:, None]
    some = undominated(back, onward, _TRIES)
    if len(some) > _STATES:
        return some[:0]
    onward, back = onward[some][:, some], back[some][:, some]
    gain = back - back.diagonal() + (onward[:, None] - onward).min(axis=-1)
    # Where two choices are as good in the long run, their sums still differ by rounding.
    return some if gain.min() >= -_ROUNDING * np.abs(onward).max() else some[:0]


def cuts(blocks: Blocks) -> Ints:
    """Where the pieces of a run end, in blocks: those of the longest together, then one by one."""
    copies = blocks.run.copies
    ends = {0, *(copies >> k << k for k in range(len(blocks.powers)))}
    if blocks.steady.size:
        ends.add((copies // blocks.piece - 1) * blocks.piece)
    return np.array(sorted(ends))


def edges_outside(run: Run, count: int) -> Ints:
    """The edges that belong to no block of the run, of `count` in all."""
    step = len(run.edges)
    of_block = np.empty(step, np.int64)
    of_block[run.edges % step] = run.edges
    below, above = np.arange(run.edges.max()), np.arange(run.edges.min() + run.copies * step, count)
    edges = np.concatenate([below, above])
    block = (edges - of_block[edges % step]) // step
    return np.asarray(edges[(block < 0) | (block >= run.copies)])


def _fold_block(problem: Problem, store: Store, run: Run) -> Folding | None:
    """One block folded down to the edge between its joints; None if something else is left."""
    joints = run.joint, run.joint + run.period
    local = np.append(run.joint, np.arange(run.begin, run.begin + run.period))
    block = start(problem, store, local, run.edges, [])
    block.locked = (local == joints[0]) | (local == joints[1])
    block.kind[block.locked] = store.zero(int(problem.vertex_kinds.of[run.joint]))
    one_by_one(block)
    return block if len(block.ids) == 2 and len(block.ends) == 1 else None


def total_by_rows(problem: Problem, chosen: Rows, choice: Ints) -> float:
    """The cost of a choice: the rows of its run times their number, and the rest one by one."""
    run, choices = chosen.run, chosen.rows.T
    cost = np.zeros(len(chosen.counts))
    kinds = problem.vertex_kinds
    for kind, mine in zip(kinds.of[run.begin : run.begin + run.period], choices[1:], strict=True):
        cost += kinds.tables[kind].take(mine)
    kinds = problem.edge_kinds
    ends = np.maximum(problem.ends[run.edges] - run.begin + 1, 0)
    for kind, (u, v) in zip(kinds.of[run.edges], ends, strict=True):
        cost += kinds.tables[kind][choices[u], choices[v]]
    outside = np.append(np.arange(run.begin), np.arange(run.end, len(problem)))
    edges = edges_outside(run, len(problem.edges))
    return float(cost @ chosen.counts) + problem.total_of(choice, outside, edges)
