"""The exact price of splitting one operator otherwise, with everything else chosen anew.

For operator v and each split s that it could have,

    best(s) = min over choices x with x_v in s of total(x), within the memory limit

is a search with v's choices restricted to s. The smallest best(s) is the runner-up.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np

from shardfold.cluster import Cluster, Mesh
from shardfold.cluster.mesh import Axis
from shardfold.costs import Pricing, optimizer_named, pricing_named
from shardfold.costs.steps import Values
from shardfold.graph import Graph
from shardfold.plans.alternatives import Limit, Tried, alternatives
from shardfold.plans.assemble import Assembly
from shardfold.plans.differences import changes, terms
from shardfold.plans.explanation import Alternative, Explanation, Reason
from shardfold.plans.holding import holding
from shardfold.plans.pins import Pin, held, matching, refused
from shardfold.plans.plan import OperatorEntry, Plan
from shardfold.plans.recall import restated
from shardfold.plans.restrict import Kept, Restricted, restricted
from shardfold.plans.turning import Asker, Scaled, knobs, turning
from shardfold.search import Problem
from shardfold.spaces import Atoms

SMALL = 0.05  # of the slowest operator that matches: those below are left out
MOST = 5  # operators that are explained where none is named
ROUNDING = 1e-9
TIE = 1e-11  # of the step: what a choice other than the plan's costs on top, to settle ties

Watch = Callable[[int, int], None]


@dataclass(frozen=True)
class Case:
    """A plan on its tables: the choice, what its pins leave, and the limit that it keeps to."""

    assembly: Assembly
    left: Restricted
    limit_bytes: float | None  # None: no plan fits

    @cached_property
    def limit(self) -> Limit:
        """The limit, with what follows from it."""
        return Limit(self.problem, self.left, self.limit_bytes)

    @property
    def problem(self) -> Problem:
        """Every choice, pinned or not."""
        return self.assembly.tabulated.problem

    @cached_property
    def step_seconds(self) -> float:
        """What the plan's choice costs."""
        return self.problem.total(self.assembly.choice)

    @cached_property
    def entries(self) -> tuple[OperatorEntry, ...]:
        """The plan's operators, as in the graph."""
        return self.assembly.operators()

    @cached_property
    def vertex_of(self) -> dict[int, int]:
        """The vertex of each operator."""
        vertices = self.assembly.tabulated.vertices
        return {vertex.index: v for v, vertex in enumerate(vertices) if vertex.space is not None}


def case_of(
    plan: Plan, graph: Graph, atoms: Atoms, cluster: Cluster, pricing: Pricing | None = None
) -> Case:
    """The plan's tables made anew, with its own choice, pins and limit; prices by their name."""
    pricing = pricing or pricing_named(plan.provenance.cost)
    optimizer = optimizer_named(plan.provenance.optimizer)
    mesh = mesh_of(plan, cluster)
    assembly = restated(plan, graph, atoms, mesh, pricing.model(cluster, mesh), optimizer)
    tables = assembly.tabulated
    pins = [] if plan.pinned is None else [Pin.parse(p.pattern, p.split) for p in plan.pinned.pins]
    kept, refusal = held(pins, assembly.splits, tables)
    if refusal is not None:
        raise refused({str(mesh): refusal}, graph)
    limit = plan.estimate.limit_bytes
    fits = tables.problem.total_bytes(assembly.choice) <= limit
    return Case(assembly, restricted(tables.problem, kept), limit if fits else None)


def mesh_of(plan: Plan, cluster: Cluster) -> Mesh:
    """The plan's mesh on the levels of its cluster."""
    levels = [level.name for level in cluster.levels]
    return Mesh(tuple(Axis(a.name, a.size, levels.index(a.level)) for a in plan.mesh))


def explain(
    plan: Plan,
    case: Case,
    pattern: str | None,
    everything: bool,
    watch: Watch,
    asker: Asker | None = None,
    scaled: Scaled | None = None,
) -> Explanation:
    """Reasons for the operators that match `pattern`, or for the slowest ones.

    With an asker, what would turn each of them is looked for, as long as it has time.

    Operators at the same place of repeated blocks are explained once, and those that take next
    to no time are left out, unless `everything` is asked for.
    """
    picked, left_out = _picked(case, pattern, everything)
    reasons = []
    settings = [] if asker is None else knobs(asker.setting, case.limit.binds, scaled)
    for number, (index, alike) in enumerate(picked):
        watch(number, len(picked))
        reason = _reason(case, index, alike, everything)
        if asker is not None and not reason.is_pinned:
            split = frozenset(reason.operator.split.items())
            found = turning(asker, settings, case.vertex_of[index], split)
            reason = msgspec.structs.replace(reason, turning=found)
        reasons.append(reason)
    stated = plan.estimate.step_seconds * (1 + ROUNDING)
    return Explanation(
        cluster=plan.cluster,
        mesh=plan.mesh,
        step_seconds=case.step_seconds,
        optimal=plan.estimate.optimal and case.step_seconds <= stated,
        limit_bytes=case.limit_bytes,
        limit_binds=case.limit.binds,
        reasons=tuple(reasons),
        left_out=left_out,
        is_simulated=plan.simulation is not None,
        micro_batches=plan.micro_batches,
    )


def _picked(case: Case, pattern: str | None, everything: bool) -> tuple[list[tuple[int, int]], int]:
    """The operators to explain, each with how many are alike; and how many are left out."""
    graph, entries = case.assembly.graph, case.entries
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
    offered = case.assembly.splits.offered(case.assembly.tabulated.vertices[v])
    chosen = frozenset(entry.split.items())
    found = alternatives(case.limit, v, offered, chosen, everything)
    other = case.assembly.choice
    if found and found[0].solution is not None:
        is_free = not case.limit.binds and case.limit.is_within(found[0].solution)
        other = _nearest(case, found[0].kept) if is_free else tuple(found[0].solution.choice)
    return Reason(
        operator=entry,
        alike=alike,
        is_pinned=v in case.left.kept,
        step_seconds=case.step_seconds,
        alternatives=tuple(map(_alternative, found)),
        terms=terms(case.assembly, v, other),
        changes=changes(case.assembly, v, other),
        holding=holding(case.assembly, v, case.step_seconds),
    )


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
    problem, trifle = case.problem, TIE * case.step_seconds
    known: dict[tuple[int, int], Values] = {}
    costs = []
    for table, at in zip(problem.costs, case.assembly.choice, strict=True):
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
    return tuple(restricted(nudged, kept).solve(case.limit_bytes).choice)
