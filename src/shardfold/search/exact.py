"""The exact search: fold what repeats, eliminate what is left, and read the choices back."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from shardfold.search.eliminate import eliminate, trace_back
from shardfold.search.factors import Factor, Factors, factors_of
from shardfold.search.fold import Folding, condition, fold, start
from shardfold.search.kinds import Ints
from shardfold.search.orders import Forecast, forecast
from shardfold.search.problem import Problem
from shardfold.search.solution import Solution, Statistics
from shardfold.search.store import Store
from shardfold.search.unfold import unfold
from shardfold.search.watch import Watch, ignore


def exact(problem: Problem, *, order: str = "auto", watch: Watch = ignore) -> Solution:
    """Find a cheapest choice by min-sum elimination, and prove it cheapest."""
    begin = time.perf_counter()
    choice = np.zeros(len(problem), np.int64)
    store = Store(problem.vertex_kinds.tables, problem.edge_kinds.tables)
    folding = start(problem, store)
    fold(folding)
    core = core_of(folding)
    plan = forecast(core, order)
    chosen: dict[int, int] = {}
    trace_back(eliminate(core, plan.order, watch), chosen)
    choice[folding.ids] = [chosen[i] for i in range(len(folding.ids))]
    choice[folding.contexts] = [chosen[len(folding.ids) + i] for i in range(len(folding.contexts))]
    unfold(folding, choice)
    cost = problem.total(choice)
    statistics = Statistics("exact", plan.name, time.perf_counter() - begin, store.largest, 8*store.new_entries)
    size = problem.total_bytes(choice) if problem.has_bytes else None
    return Solution(tuple(choice.tolist()), cost, True, cost, size, statistics)


def core_of(folding: Folding) -> Factors:
    """What folding left, as factors: its vertices first, then the conditioned ones."""
    store, count = folding.store, len(folding.ids)
    depth = len(folding.contexts)
    outer = tuple(count + i for i in reversed(range(depth)))
    base = len(store.vertices)
    factors = [
        _factor(store.vertices[kind], outer, (v,), kind)
        for v, kind in enumerate(folding.kind.tolist())
    ]
    factors += [
        _factor(store.edges[kind], outer, (u, v), base + kind)
        for (u, v), kind in zip(folding.ends.tolist(), folding.edge_kind.tolist(), strict=True)
    ]
    base += len(store.edges)
    sizes = folding.sizes.tolist()
    if depth:
        factors += [_factor(c, outer, (), base + i) for i, c in enumerate(folding.constants)]
        context_sizes = {}
    return Factors(tuple(sizes), tuple(factors))


def _factor(table: np.ndarray, outer: tuple[int, ...], own: tuple[int, ...], kind: int) -> Factor:
    leading = table.ndim - len(own)
    scope = outer[len(outer) - leading :] + own
    kept = tuple(i for i in range(table.ndim) if i >= leading or table.shape[i] > 1)
    return Factor(
        tuple(scope[i] for i in kept), table.reshape([table.shape[i] for i in kept]), kind
    )
