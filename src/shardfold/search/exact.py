"""The exact search: fold what repeats, eliminate what is left, and read the choices back.

Before a table is built its size is known: `forecast` runs each order on sizes only. Where even the
best order needs more than `table_bytes`, the search goes over to bounds (see `bounded`), which
needs no more memory than the problem itself and still proves its answer or states its gap.
"""

from __future__ import annotations

import numpy as np

from shardfold.search.backtrack import unfold
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
from shardfold.search.interning import Array
from shardfold.search.problem import Problem
from shardfold.search.repeats import find_run, total_by_rows, without_run
from shardfold.search.solution import Answer, Watch, ignore
from shardfold.search.table_store import Folding, Store

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
