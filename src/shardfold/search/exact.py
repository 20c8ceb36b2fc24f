"""The exact search: fold what repeats, eliminate what is left, and read the choices back.

Before a table is built its size is known: `forecast` runs each order on sizes only. Where even the
best order needs more than `table_bytes`, the search goes over to bounds (see `bounded`), which
needs no more memory than the problem itself and still proves its answer or states its gap.
"""

from __future__ import annotations

import numpy as np

from shardfold.search.branch_and_bound import SECONDS, bounded
from shardfold.search.elimination import (
    Factor,
    Factors,
    Forecast,
    eliminate,
    factors_of,
    forecast,
    trace_back,
)
from shardfold.search.float32_pruning import narrowed
from shardfold.search.fold import condition, fold, fold_few, start
from shardfold.search.interning import Array, Ints
from shardfold.search.problem import Problem
from shardfold.search.repeats import cuts, find_run, total_by_rows, without_run
from shardfold.search.solution import Answer, Watch, ignore
from shardfold.search.table_store import Blocks, Folding, Group, Rows, Steps, Store

TABLE_BYTES = 1 << 30
"""What all tables together may hold, unless the caller says otherwise."""

MAX_WORK = 4e10
"""Joint entries beyond which elimination would take about a minute."""

_CHEAP = 2e6
"""Joint entries up to which eliminating at once beats looking for choices to strike out first."""

_LONG = 1_000
_WIDE = 32
_CONTEXT_ENTRIES = 64


def exact(
    problem: Problem,
    *,
    order: str = "auto",
    table_bytes: float = TABLE_BYTES,
    seconds: float = SECONDS,
    watch: Watch = ignore,
) -> Answer:
    """Find a cheapest choice and prove it cheapest; with tables too large, prove how near it is.

    Orders other than "auto" are followed as they are, without folding first.
    """
    if order != "auto":
        return _unfolded(problem, order, table_bytes, seconds, watch)
    small = narrowed(problem)
    if small is None:
        return _folded_first(problem, table_bytes, seconds, watch)
    answer = _folded_first(small.problem, table_bytes, seconds, watch)
    largest = max(small.largest, answer.largest_table)
    peak = small.peak_bytes + answer.peak_bytes
    choice = small.original(answer.choice)
    return Answer(choice, answer.lower_bound, answer.order, largest, peak)


def _folded_first(problem: Problem, table_bytes: float, seconds: float, watch: Watch) -> Answer:
    """Fold, and eliminate what is left or go over to bounds."""
    folding = folded(problem)
    if not len(folding.ids):
        return _whole(problem, folding, Answer(np.zeros(0, np.int64), 0.0, "folded"))
    _condition_hubs(problem, folding)
    core = core_of(problem, folding)
    plan = forecast(core, "auto")
    if folding.contexts and not _fits(plan, table_bytes):
        folding = folded(problem)
        core = core_of(problem, folding)
        plan = forecast(core, "auto")
    if _fits(plan, table_bytes) and (plan.work <= _CHEAP or folding.contexts):
        answer = _eliminated(core, plan, watch)
    else:
        answer = bounded(core, table_bytes=table_bytes, seconds=seconds, watch=watch)
    return _whole(problem, folding, answer)


def _whole(problem: Problem, folding: Folding, core: Answer) -> Answer:
    """The answer for what folding left, as one for the whole problem."""
    choice = np.empty(len(problem), np.int64)
    if len(core.choice):
        choice[np.concatenate([folding.ids, np.array(folding.contexts, np.int64)])] = core.choice
    rows = unfold(folding, choice)
    cost = None if rows is None else total_by_rows(problem, rows, choice)
    bound = core.lower_bound
    if bound is not None and not folding.contexts:
        bound += float(sum(folding.constants))
    largest = max(folding.store.largest, core.largest_table)
    peak = 8 * folding.store.new_entries + core.peak_bytes
    return Answer(choice, bound, core.order, largest, peak, cost)


def folded(problem: Problem) -> Folding:
    """The problem with every run and every vertex of at most two neighbours folded away."""
    store = Store(problem.vertex_kinds.tables, problem.edge_kinds.tables)
    run = find_run(problem)
    folding = without_run(problem, store, run) if run is not None else None
    if folding is None:
        folding = start(problem, store, np.arange(len(problem)), slice(None), [])
    fold_few(folding)
    return folding


def _condition_hubs(problem: Problem, folding: Folding) -> None:
    """Fix the few vertices that a very long run all knows, so that the run folds after all."""
    entries = 1
    while len(folding.ids) > _LONG:
        degree = np.bincount(folding.ends.reshape(-1), minlength=len(folding.ids))
        hub = int(np.argmax(degree))
        entries *= int(folding.sizes[hub])
        if degree[hub] < _WIDE or entries > _CONTEXT_ENTRIES:
            return
        condition(folding, hub)
        fold(folding)


def _unfolded(
    problem: Problem, order: str, table_bytes: float, seconds: float, watch: Watch
) -> Answer:
    """Eliminate the problem as it stands, along the order asked for."""
    factors = factors_of(problem)
    plan = forecast(factors, order)
    if (order == "auto" and plan.work > _CHEAP) or not _fits(plan, table_bytes):
        return bounded(factors, table_bytes=table_bytes, seconds=seconds, watch=watch)
    return _eliminated(factors, plan, watch)


def _fits(plan: Forecast, table_bytes: float) -> bool:
    return 8 * plan.stored <= table_bytes and plan.work <= MAX_WORK


def _eliminated(factors: Factors, plan: Forecast, watch: Watch) -> Answer:
    chosen: dict[int, int] = {}
    trail, optimum = eliminate(factors, plan.order, watch)
    trace_back(trail, chosen)
    choice = np.array([chosen[v] for v in range(len(factors.sizes))], dtype=np.int64)
    return Answer(choice, optimum, plan.name, int(plan.largest), int(8 * plan.stored))


def core_of(problem: Problem, folding: Folding) -> Factors:
    """What folding left, as factors: its vertices first, then the conditioned ones."""
    store, count = folding.store, len(folding.ids)
    outer = tuple(count + i for i in reversed(range(len(folding.contexts))))
    edge_base = len(store.vertices)
    factors = [
        _factor(store.vertices[kind], outer, (v,), kind)
        for v, kind in enumerate(folding.kind.tolist())
    ]
    factors += [
        _factor(store.edges[kind], outer, (u, v), edge_base + kind)
        for (u, v), kind in zip(folding.ends.tolist(), folding.edge_kind.tolist(), strict=True)
    ]
    if outer:
        base = edge_base + len(store.edges)
        factors += [_factor(c, outer, (), base + i) for i, c in enumerate(folding.constants)]
    sizes = [*folding.sizes.tolist(), *problem.sizes[folding.contexts].tolist()]
    return Factors(tuple(sizes), tuple(factors))


def _factor(table: Array, outer: tuple[int, ...], own: tuple[int, ...], kind: int) -> Factor:
    """A table with leading axes as a factor over conditioned vertices and its own."""
    table = np.asarray(table)
    scope = outer[len(outer) + len(own) - table.ndim :] + own
    return Factor.of(scope, table, kind)


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
