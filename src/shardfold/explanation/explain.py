"""Explain a split: the exact cost of every other one, its terms, and the neighbours behind it.

Difference of two choices: the terms of the cost, and the operators with other splits (`terms`,
`changes`).

Neighbours (`holding`): by itself operator v would take the config a with the least cost of its own;
the plan has x. If cost(a) < cost(x), each edge to a neighbour says how much more it would cost with
a, all others unchanged: the largest of these are the reason for x.

Alternatives: the price of another split, with everything else searched again. For operator v and
each split s that it could have,

    best(s) = min over choices x with x_v in s of total(x), within the memory limit

is a search with v's choices restricted to s. The smallest best(s) is the runner-up.

Where the limit binds, a byte has a price w at it, and for the choices x that a split s leaves

    bound(s) = min over x of (cost + w bytes) - w limit

is at most the best step that fits: one ordinary search a split. Only splits that their bound lets
be the best are then searched within the limit, which takes much longer.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import numpy as np

from shardfold.cluster import Cluster, mesh_from_text
from shardfold.costs import Optimizer, Pricing
from shardfold.costs.steps import Compute, Values
from shardfold.errors import ClusterError, InfeasibleError, PlanError
from shardfold.explanation.explanation import (
    Alternative,
    Change,
    Explanation,
    Holding,
    Reason,
    Term,
)
from shardfold.explanation.explanation import Kept as Priced
from shardfold.explanation.sensitivity import Asker, Scaled, Setting, knobs, turning
from shardfold.graph import Graph
from shardfold.graph.graph import shared_prefix, without
from shardfold.plans.entries import operator_entries
from shardfold.plans.plan import OperatorEntry, Plan
from shardfold.plans.read import recalled, restated
from shardfold.report.units import seconds, size
from shardfold.search import Problem, Solution, solve
from shardfold.search.subproblem import Kept, Subproblem, restrict
from shardfold.sharding import Subdims
from shardfold.sharding.names import Key, Rows, Split
from shardfold.simulate import simulate
from shardfold.simulate.decoded import DecodedChoice
from shardfold.simulate.memory import LocalLayouts, MemoryFacts
from shardfold.simulate.tasks import Scheduler
from shardfold.strategies.pins import matching

MOST_SOLVED = 3  # splits of an operator that are searched within a limit that binds
WEIGHTS = 16  # prices of a byte that are tried
ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Tried:
    """A split, and how far it was searched: a choice that fits, a bound, or neither: none fits."""

    split: Split
    kept: Kept
    bound: float
    solution: Solution | None = None
    fits: bool = True

    @property
    def order(self) -> float:
        """What the split costs at least."""
        return self.bound if self.solution is None else self.solution.cost


@dataclass(frozen=True)
class Limit:
    """A problem with the limit on its choices' bytes; None leaves memory aside."""

    problem: Problem  # every choice
    left: Subproblem  # those that pins leave
    limit_bytes: float | None

    @cached_property
    def binds(self) -> bool:
        """Whether the cheapest choice does not fit."""
        return self.limit_bytes is not None and not self.is_within(self.left.solve())

    @cached_property
    def byte_price(self) -> float:
        """What a byte is worth at a limit that binds: the slope of the hull of (bytes, cost)."""
        problem = self.left.problem
        assert self.limit_bytes is not None
        over, under = (_point(problem, solve(p)) for p in (problem, problem.blended(0.0, 1.0)))
        price = 0.0
        for _ in range(WEIGHTS):
            price = max((under[0] - over[0]) / (over[1] - under[1]), 0.0)
            cost, size = _point(problem, solve(problem.blended(1.0, price)))
            if cost + price * size >= (over[0] + price * over[1]) * (1 - ROUNDING):
                break
            over, under = (
                (over, (cost, size)) if size <= self.limit_bytes else ((cost, size), under)
            )
        return price

    @cached_property
    def blend(self) -> Problem:
        """The problem with bytes at their price."""
        return self.problem.blended(1.0, self.byte_price)

    def is_within(self, solution: Solution) -> bool:
        """Whether a choice fits."""
        return self.limit_bytes is None or (solution.bytes or 0.0) <= self.limit_bytes

    def first_look(self, split: Split, kept: Kept) -> Tried:
        """One ordinary search: the best choice, where that fits, or a bound."""
        if not self.binds:
            found = restrict(self.problem, kept).solve()
            return Tried(split, kept, found.lower_bound, found if self.is_within(found) else None)
        assert self.limit_bytes is not None
        found = restrict(self.blend, kept).solve()
        bound = found.lower_bound - self.byte_price * self.limit_bytes
        cost, size = self.problem.total(found.choice), self.problem.total_bytes(found.choice)
        is_best = size <= self.limit_bytes and cost <= bound + ROUNDING * cost
        exact = replace(found, cost=cost, bytes=size, lower_bound=bound)
        return Tried(split, kept, bound, exact if is_best else None)

    def second_look(self, tried: Tried) -> Tried:
        """The search within the limit."""
        try:
            found = restrict(self.problem, tried.kept).solve(self.limit_bytes)
        except InfeasibleError:
            return replace(tried, fits=False)
        return replace(tried, solution=found, bound=max(found.lower_bound, tried.bound))


def _point(problem: Problem, solution: Solution) -> tuple[float, float]:
    return problem.total(solution.choice), problem.total_bytes(solution.choice)


def alternatives(
    limit: Limit, v: int, offered: Mapping[Key, tuple[Split, Rows]], chosen: Key, everything: bool
) -> list[Tried]:
    """The splits of vertex v but the chosen one: known costs first, then bounds, then no fit.

    With `everything`, all are searched within the limit.
    """
    pinned = {u: rows for u, rows in limit.left.kept.items() if u != v}
    found = [
        limit.first_look(split, {**pinned, v: rows})
        for key, (split, rows) in offered.items()
        if key != chosen
    ]
    budget = len(found) if everything else MOST_SOLVED
    while budget:
        best = min((t.order for t in found if t.solution is not None), default=float("inf"))
        waiting = [t for t in found if t.solution is None and t.fits]
        waiting = [t for t in waiting if everything or t.bound < best * (1 - ROUNDING)]
        if not waiting:
            break
        first = min(waiting, key=lambda t: t.bound)
        found[found.index(first)] = limit.second_look(first)
        budget -= 1
    return sorted(found, key=lambda t: (not t.fits, t.solution is None, t.order))


SAME = 1e-12  # of the step: terms below are rounding


def terms(decoded: DecodedChoice, v: int, other: Sequence[int]) -> tuple[Term, ...]:
    """Where the costs of `other` and of the decoded choice differ, the largest part first.

    The operator of vertex v has its arithmetic and its collectives apart; every other term is an
    operator's own work, or all that a tensor or a parameter is moved and updated.
    """
    problem, tables, mine = decoded.tables.problem, decoded.tables, decoded.choice
    found: dict[str, float] = defaultdict(float)
    prefix = shared_prefix([op.origin.module for op in decoded.graph.ops])
    for u, vertex in enumerate(tables.vertices):
        if mine[u] == other[u]:
            continue
        if u == v:
            for label, seconds in _own(decoded, v, other[v]).items():
                found[label] += seconds
            continue
        change = float(problem.costs[u][other[u]] - problem.costs[u][mine[u]])
        is_operator = vertex.space is not None
        label = _work(decoded.graph, vertex.index, prefix) if is_operator else ""
        found[label or moves(decoded.graph, vertex.index)] += change
    for edge, table in zip(tables.edges, problem.edge_costs, strict=True):
        before = (mine[edge.source], mine[edge.target])
        after = (other[edge.source], other[edge.target])
        if before != after:
            found[moves(decoded.graph, edge.tensor)] += float(table[after] - table[before])
    least = SAME * problem.total(mine)
    kept = [Term(what, seconds) for what, seconds in found.items() if abs(seconds) > least]
    return tuple(sorted(kept, key=lambda term: -abs(term.seconds)))


def _own(decoded: DecodedChoice, v: int, choice: int) -> dict[str, float]:
    """How much more arithmetic and communication vertex v has under `choice`."""
    vertex = decoded.tables.vertices[v]
    assert vertex.space is not None
    found: dict[str, float] = defaultdict(float)
    for sign, at in ((1, choice), (-1, decoded.choice[v])):
        for step in decoded.own(vertex.index, vertex.space, at):
            what = "its own arithmetic" if isinstance(step, Compute) else "its own collectives"
            found[what] += sign * decoded.price(step) * decoded.micro_batches
    return found


def _work(graph: Graph, index: int, prefix: int) -> str:
    """The work of an operator, by its module and kind, or by its name where that is the model."""
    op = graph.ops[index]
    module = without(op.origin.module, prefix)
    kind = op.kind.rpartition(".")[2]
    return f"the work of {f'{module} {kind}' if module else op.name}"


def moves(graph: Graph, tensor: int) -> str:
    """A parameter's gathers, sums and update; or the reshards of what an operator makes."""
    found = graph.tensors[tensor]
    if found.role == "parameter":
        return f"sums and update of {found.name}"
    return f"moves of {found.name}"


def changes(decoded: DecodedChoice, v: int, other: Sequence[int]) -> tuple[Change, ...]:
    """The operators that `other` splits otherwise, the nearest to vertex v first."""
    found = []
    for u in _by_distance(decoded, v):
        vertex = decoded.tables.vertices[u]
        if u == v or vertex.space is None or decoded.choice[u] == other[u]:
            continue
        configs = vertex.space.configs
        before, after = (
            decoded.splits.of(vertex.index, vertex.space, configs[at].tolist())
            for at in (decoded.choice[u], other[u])
        )
        if before != after:
            op = decoded.graph.ops[vertex.index]
            found.append(Change(op.name, op.origin.module, op.kind, before, after))
    return tuple(found)


def _by_distance(decoded: DecodedChoice, v: int) -> list[int]:
    """All vertices that edges join to v, nearest first."""
    neighbours: dict[int, list[int]] = defaultdict(list)
    for a, b in decoded.tables.problem.edges:
        neighbours[a].append(b)
        neighbours[b].append(a)
    seen, queue = {v: None}, deque([v])
    while queue:
        for u in neighbours[queue.popleft()]:
            if u not in seen:
                seen[u] = None
                queue.append(u)
    return list(seen)


def holding(decoded: DecodedChoice, v: int, additive_seconds: float) -> Holding | None:
    """What operator v would choose by itself, and who holds it back; None if it has its choice."""
    tables, problem = decoded.tables, decoded.tables.problem
    own, mine = problem.costs[v], decoded.choice[v]
    alone = int(own.argmin())
    saved = float(own[mine] - own[alone])
    space = tables.vertices[v].space
    assert space is not None
    if saved <= ROUNDING * additive_seconds:
        return None
    held: dict[str, float] = defaultdict(float)
    for edge, table in zip(tables.edges, problem.edge_costs, strict=True):
        if v not in (edge.source, edge.target):
            continue
        ends = (decoded.choice[edge.source], decoded.choice[edge.target])
        other = (alone, ends[1]) if edge.source == v else (ends[0], alone)
        held[moves(decoded.graph, edge.tensor)] += float(table[other] - table[ends])
    terms = [Term(what, more) for what, more in held.items() if more > ROUNDING * additive_seconds]
    return Holding(
        split=decoded.splits.of(tables.vertices[v].index, space, space.configs[alone].tolist()),
        saved_seconds=saved,
        holders=tuple(sorted(terms, key=lambda term: -term.seconds)),
    )


SMALL = 0.05  # of the slowest operator that matches: those below are left out
MOST = 5  # operators that are explained where none is named
ROUNDING = 1e-9
TIE = 1e-11  # of the step: what a choice other than the plan's costs on top, to settle ties

Watch = Callable[[int, int], None]


@dataclass(frozen=True)
class Case:
    """A plan on its tables: the choice, what its pins leave, and the limit that it keeps to."""

    decoded: DecodedChoice
    left: Subproblem
    limit_bytes: float | None  # None: no plan fits
    scheduler: Scheduler | None = None  # None: the costs know no overlap

    @cached_property
    def layouts(self) -> LocalLayouts:
        """Where everything lies."""
        return LocalLayouts(self.decoded, MemoryFacts(self.decoded.graph, self.decoded.subdims))

    @cached_property
    def limit(self) -> Limit:
        """The limit, with what follows from it."""
        return Limit(self.problem, self.left, self.limit_bytes)

    @property
    def problem(self) -> Problem:
        """Every choice, pinned or not."""
        return self.decoded.tables.problem

    @cached_property
    def additive_seconds(self) -> float:
        """What the plan's choice costs."""
        return self.problem.total(self.decoded.choice)

    @cached_property
    def step_seconds(self) -> float:
        """The plan's step: simulated, or the additive cost where the costs know no overlap."""
        if self.scheduler is None:
            return self.additive_seconds
        return simulate(self.scheduler.alone(self.decoded)).step_seconds

    @cached_property
    def entries(self) -> tuple[OperatorEntry, ...]:
        """The plan's operators, as in the graph."""
        return operator_entries(self.decoded)

    @cached_property
    def vertex_of(self) -> dict[int, int]:
        """The vertex of each operator."""
        vertices = self.decoded.tables.vertices
        return {vertex.index: v for v, vertex in enumerate(vertices) if vertex.space is not None}


def case_of(
    plan: Plan, graph: Graph, subdims: Subdims, cluster: Cluster, pricing: Pricing
) -> tuple[Case, Setting]:
    """The plan's tables made anew, with its own choice, pins and limit."""
    if plan.pipeline is not None:
        raise PlanError(
            f"The splits of a plan with pipeline stages ({plan.pipeline.parts} here) cannot be "
            "explained yet: plan with --pipeline off."
        )
    workspace = Scheduler(graph, subdims, cluster).workspace_bytes
    limit = plan.estimate.limit_bytes - workspace  # what is left for a sum of bytes
    setting = Setting(plan, graph, subdims, cluster, pricing, limit)
    decoded = replace(setting.tables, choice=recalled(plan, setting.tables))
    scheduler = Scheduler(graph, subdims, cluster) if pricing.overlaps else None
    if decoded.tables.problem.total_bytes(decoded.choice) <= limit:
        return Case(decoded, setting.left, limit, scheduler), setting
    return Case(decoded, setting.left, None, scheduler), replace(setting, limit_bytes=None)


def price_elsewhere(
    plan: Plan,
    graph: Graph,
    subdims: Subdims,
    cluster: Cluster,
    pricing: Pricing,
    optimizer: Optimizer,
) -> Priced:
    """What the plan's choice costs in another setting, or why it is not possible there."""
    if plan.pipeline is not None:
        return Priced(None, None, "The stages of a pipeline are not priced elsewhere yet.")
    try:
        mesh = mesh_from_text("x".join(str(axis.size) for axis in plan.mesh) or "1", cluster)
        model = pricing.model(cluster, mesh)
        decoded = restated(plan, graph, subdims, mesh, model, optimizer)
    except (ClusterError, PlanError) as error:
        return Priced(None, None, str(error))
    if pricing.overlaps:
        found = simulate(Scheduler(graph, subdims, cluster).alone(decoded))
        return Priced(found.step_seconds, found.peak_bytes)
    problem = decoded.tables.problem
    return Priced(problem.total(decoded.choice), problem.total_bytes(decoded.choice))


def explain(
    case: Case,
    setting: Setting,
    pattern: str | None,
    everything: bool,
    watch: Watch,
    seconds: float = 0.0,
    scaled: Scaled | None = None,
) -> Explanation:
    """Reasons for the operators that match `pattern`, or for the slowest ones.

    For about `seconds`, what would turn each of them is looked for.

    Operators at the same place of repeated blocks are explained once, and those that take next
    to no time are left out, unless `everything` is asked for.
    """
    picked, left_out = _picked(case, pattern, everything)
    reasons, plan = [], setting.plan
    asker = Asker(setting, seconds) if seconds > 0 else None
    settings = [] if asker is None else knobs(setting, case.limit.binds, scaled)
    for number, (index, alike) in enumerate(picked):
        watch(number, len(picked))
        reason = _reason(case, index, alike, everything)
        if asker is not None and not reason.is_pinned:
            split = frozenset(reason.operator.split.items())
            found = turning(asker, settings, case.vertex_of[index], split)
            reason = msgspec.structs.replace(reason, turning=found)
        reasons.append(reason)
    stated = plan.estimate.additive_seconds * (1 + ROUNDING)
    return Explanation(
        cluster=plan.cluster,
        mesh=plan.mesh,
        step_seconds=case.step_seconds,
        additive_seconds=case.additive_seconds,
        optimal=plan.estimate.optimal and case.additive_seconds <= stated,
        limit_bytes=None if case.limit_bytes is None else plan.estimate.limit_bytes,
        limit_binds=case.limit.binds,
        reasons=tuple(reasons),
        left_out=left_out,
        prefix=shared_prefix([op.origin.module for op in setting.graph.ops]),
        is_simulated=plan.simulation is not None,
        micro_batches=plan.micro_batches,
    )


def _picked(case: Case, pattern: str | None, everything: bool) -> tuple[list[tuple[int, int]], int]:
    """The operators to explain, each with how many are alike; and how many are left out."""
    graph, entries = case.decoded.graph, case.entries
    groups = [[i] for i in range(len(entries))] if pattern is None else matching(pattern, graph)
    named = [index for group in groups for index in group]
    if everything:
        return [(index, 1) for index in named], 0
    alike: dict[object, list[int]] = {}
    for index in named:
        entry = entries[index]
        place = re.sub(r"\d+", "*", entry.module) or entry.name
        split = frozenset(entry.split.items())
        alike.setdefault((place, entry.kind, split), []).append(index)
    slow = sorted(alike.values(), key=lambda members: -entries[members[0]].seconds)
    least = SMALL * entries[slow[0][0]].seconds
    kept = [members for members in slow if entries[members[0]].seconds >= least]
    kept = kept[:MOST] if pattern is None else kept
    left_out = len(named) - sum(map(len, kept))
    return [(members[0], len(members)) for members in kept], left_out


def _reason(case: Case, index: int, alike: int, everything: bool) -> Reason:
    """Search with each other split of operator `index`, and compare the best with the plan."""
    v = case.vertex_of[index]
    entry = case.entries[index]
    offered = case.decoded.offered(v)
    chosen = frozenset(entry.split.items())
    found = alternatives(case.limit, v, offered, chosen, everything)
    other = case.decoded.choice
    if found and found[0].solution is not None:
        is_free = not case.limit.binds and case.limit.is_within(found[0].solution)
        other = _nearest(case, found[0].kept) if is_free else tuple(found[0].solution.choice)
    return Reason(
        operator=entry,
        alike=alike,
        is_pinned=v in case.left.kept,
        additive_seconds=case.additive_seconds,
        alternatives=tuple(map(_alternative, found)),
        terms=terms(case.decoded, v, other),
        changes=changes(case.decoded, v, other),
        holding=holding(case.decoded, v, case.additive_seconds),
        experiment=_experiment(case, v),
        memory=kept_or_again(case.layouts, v),
    )


def kept_or_again(layouts: LocalLayouts, v: int) -> str:
    """What becomes of the results that backward reads: kept, recomputed, or not needed."""
    decoded, facts, graph = layouts.decoded, layouts.facts, layouts.graph
    op = decoded.tables.vertices[v].index
    readers = graph.readers()
    wanted = {
        tensor: [i for i, k in readers.get(tensor, ()) if k in facts.saved_operands[i]]
        for tensor in graph.ops[op].results
    }
    own = facts.keeps_results[op]
    read = [t for t in wanted if wanted[t] or own]
    held = sum(layouts.crossing_bytes(tensor) for tensor in read)
    names = [graph.ops[i].name for i in dict.fromkeys(i for t in read for i in wanted[t])]
    by = f"the backward of {names[0] if names else graph.ops[op].name} reads it"
    if layouts.regions.runs_again(op):
        again = sum(decoded.total(s) for s in decoded.work(v) if s.phase == "recompute")
        why = f" instead of keeping {size(held)} ({by})" if read else " for others that run again"
        return f"recomputed: it runs again in backward, {seconds(again)},{why}."
    if not read or not graph.has_gradient(op):
        return ""
    return f"kept: {size(held)} ({by})."


def _experiment(case: Case, v: int) -> str:
    """The splits of an operator, if an experiment found them."""
    space = case.decoded.tables.vertices[v].space
    return str(space.rule.rule) if space is not None and space.rule.rule.found else ""


def _alternative(tried: Tried) -> Alternative:
    found = tried.solution
    if found is None:
        return Alternative(tried.split, None, tried.bound if tried.fits else None, None)
    bound = found.cost if found.is_optimal else tried.bound
    return Alternative(tried.split, found.cost, bound, found.bytes)


def _nearest(case: Case, kept: Kept) -> tuple[int, ...]:
    """Of the best choices that are left, one that differs from the plan in as little as possible.

    Choices other than the plan's cost a trifle more, too little to change what is best.
    """
    problem, trifle = case.problem, TIE * case.additive_seconds
    known: dict[tuple[int, int], Values] = {}
    costs = []
    for table, at in zip(problem.costs, case.decoded.choice, strict=True):
        key = (id(table), at)
        if key not in known:
            known[key] = table + trifle * (np.arange(len(table)) != at)
        costs.append(known[key])
    nudged = Problem(
        tuple(costs),
        problem.edges,
        problem.edge_costs,
        problem.bytes,
        problem.edge_bytes,
        problem.names,
    )
    return tuple(restrict(nudged, kept).solve(case.limit_bytes).choice)
