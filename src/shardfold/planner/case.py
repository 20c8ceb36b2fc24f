"""The values of the planning loop: the request, a model on one mesh, and a choice for it.

ResolvedRequest   cluster, meshes, cost model, limit, pins: all that is asked besides the model
Case              a graph on one mesh, with its blocks recomputed or not: what prices a choice
Cases             all of these for one graph, each made once
Candidate         a choice for a case: who proposed it, its additive cost, its simulated step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from math import inf
from time import process_time

import numpy as np

from shardfold.cluster import Cluster, Mesh
from shardfold.costs import CostModel, Optimizer, Pricing, Tables, tabulate
from shardfold.costs.activations import KEEP_ALL, POLICIES, Regions
from shardfold.costs.demands import Demands
from shardfold.costs.steps import Values
from shardfold.costs.tables import EdgePrices
from shardfold.costs.unroll import Ints, UnrolledProblem, unroll
from shardfold.errors import InputError
from shardfold.graph import Graph
from shardfold.operators import Rules, rules_of
from shardfold.planner.options import Prefer, Recompute
from shardfold.search import Problem, Solution, unproven
from shardfold.search.subproblem import Subproblem, restrict
from shardfold.sharding import Subdims, find_subdims
from shardfold.simulate import Schedule, Simulation
from shardfold.simulate.decoded import DecodedChoice, UnrolledChoice
from shardfold.simulate.simulate import passes, whole_step
from shardfold.simulate.tasks import Scheduler
from shardfold.strategies.pins import Pin

PATIENCE_SECONDS = 60.0  # for the searches of one graph that are long
SHORT_SECONDS = 10.0  # that each search has, whatever others took
RESERVE = 0.1  # of a device's memory: fragments, workspaces, the framework itself


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """What is asked for besides the model."""

    cluster: Cluster
    meshes: Sequence[Mesh]
    pricing: Pricing
    optimizer: Optimizer
    limit_bytes: float | None = None  # None: the device's memory less a reserve
    pins: Sequence[Pin] = ()
    recompute: Recompute = "auto"
    rules: Rules = field(default_factory=dict)
    micro_batches: int = 1  # the graph's batch is one of so many equal parts of a step's
    prefer: Prefer = "speed"  # among steps that are nearly as short as the best
    known: dict[object, tuple[object, Subdims]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def limit(self) -> float:
        """Bytes that a device may hold."""
        reserved = (1 - RESERVE) * self.cluster.device.memory_bytes
        return reserved if self.limit_bytes is None else self.limit_bytes

    def subdims_of(self, graph: Graph) -> Subdims:
        """The graph's dims in pieces, by the rules of the cost model and of the user."""
        asked = (graph, self.pricing.rules, self.rules)
        key = tuple(map(id, asked))
        if key not in self.known:
            rules = rules_of(graph, {**self.pricing.rules, **self.rules})
            self.known[key] = asked, find_subdims(graph, rules)
        return self.known[key][1]


@dataclass(slots=True, eq=False)
class Patience:
    """Processor time that the long searches of a plan share: what one takes, others no longer have.

    A search that is out of time states how far from the best its answer may be. Without this a
    model of which every search is hard would wait as long for each mesh, limit and discount.
    """

    seconds: float = PATIENCE_SECONDS

    def spend(self, search: Callable[[float], Solution]) -> Solution:
        """What a search finds in the seconds that it is given."""
        begin = process_time()
        try:
            return search(max(self.seconds, SHORT_SECONDS))
        finally:
            self.seconds -= max(process_time() - begin - SHORT_SECONDS, 0.0)


@dataclass(eq=False)
class Findings:
    """What is found of a case and holds within any limit: found once."""

    smallest: Solution | None = None
    discounted: dict[float, Subproblem] = field(default_factory=dict)  # by weight
    demands: Demands | None = None
    # Of a choice, with what the host takes to ask for all work of the step.
    simulations: dict[tuple[int, ...], tuple[Simulation, float]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Case:
    """A graph on one mesh, with some of its blocks recomputed or none."""

    request: ResolvedRequest
    scheduler: Scheduler  # of the graph, on whatever mesh
    prices: EdgePrices  # of the mesh, whatever is recomputed
    tables: Tables
    unrolled: UnrolledProblem  # the problem with all periods of every run
    allowed: Subproblem  # the choices that pins leave: all, without any
    decoded: DecodedChoice  # what all choices have in common
    known: list[Ints] = field(default_factory=list)  # good choices, as they are met
    findings: Findings = field(default_factory=Findings)
    patience: Patience = field(default_factory=Patience)

    @property
    def graph(self) -> Graph:
        """The graph, which may hold only a few periods of a run."""
        return self.scheduler.graph

    @property
    def subdims(self) -> Subdims:
        """The graph's dims in pieces."""
        return self.scheduler.subdims

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.tables.mesh

    @property
    def cost_model(self) -> CostModel:
        """What prices the steps of operators and collectives."""
        return self.prices.model

    @property
    def recomputed(self) -> Regions:
        """The blocks that backward computes again."""
        return self.tables.regions

    @property
    def is_pinned(self) -> bool:
        """Whether pins leave only some of the choices."""
        return bool(self.allowed.kept)

    @property
    def demands(self) -> Demands:
        """What every choice asks of each stream."""
        if self.findings.demands is None:
            known = (self.graph, self.subdims, self.tables, self.cost_model)
            levels = len(self.request.cluster.levels)
            self.findings.demands = Demands(*known, self.request.optimizer, levels)
        return self.findings.demands

    def discounted(self, weight: float) -> Subproblem:
        """The choices at that part of the cost of moving parameters, as pins leave them."""
        found = self.findings.discounted
        if weight not in found:
            problem, kept = discount(self.tables, self.unrolled.problem, weight), self.allowed.kept
            found[weight] = restrict(problem, kept) if kept else Subproblem(problem, {})
        return found[weight]

    @cached_property
    def unhidden(self) -> Problem:
        """The problem without what overlap may hide: the communication of parameters."""
        return discount(self.tables, self.unrolled.problem, 0.0)

    def solve(self) -> Solution:
        """The least additive cost, whatever it holds."""
        return self.patience.spend(lambda seconds: self.allowed.solve(seconds=seconds))

    def solve_smallest(self) -> Solution:
        """The fewest bytes, whatever they cost."""
        if self.findings.smallest is None:
            self.findings.smallest = self.patience.spend(self.allowed.solve_smallest)
        return self.findings.smallest

    @property
    def fixed_bytes(self) -> int:
        """What a device holds under every choice; the sum of bytes does not have it."""
        return self.scheduler.workspace_bytes

    def solve_within(
        self,
        limit: float,
        *,
        fastest: Solution | None = None,
        cutoff: float = inf,
        rounds: int | None = None,
    ) -> Solution:
        """The least additive cost within a limit (see `Subproblem.solve`)."""
        return self.patience.spend(
            lambda seconds: self.allowed.solve(
                limit - self.fixed_bytes,
                fastest=fastest,
                cutoff=cutoff,
                known=self.known,
                rounds=rounds,
                seconds=seconds,
            )
        )

    def forget(self) -> None:
        """Let go of what only the search for a plan needs; what is asked for is made again."""
        self.findings.demands = None
        self.findings.discounted.clear()
        self.decoded.surroundings.clear()

    def decode(self, choice: Sequence[int]) -> UnrolledChoice:
        """What a choice means for every operator of the model."""
        decoded = self.decoded.choosing(tuple(choice[: len(self.tables.vertices)]))
        return UnrolledChoice(decoded, self.unrolled, np.array(choice))


def make_case(
    request: ResolvedRequest,
    scheduler: Scheduler,
    prices: EdgePrices,
    regions: Regions,
    patience: Patience | None = None,
) -> Case:
    """Price all choices for a graph on a mesh, with `regions` of it recomputed."""
    tables = tabulate(
        scheduler.graph,
        scheduler.subdims,
        prices.mesh,
        prices.model,
        request.optimizer,
        regions,
        prices,
        request.micro_batches,
    )
    unrolled = unroll(tables, scheduler.graph)
    every = Subproblem(unrolled.problem, {})
    decoded = DecodedChoice(
        scheduler.graph, scheduler.subdims, tables, (), prices.model, request.optimizer
    )
    known = (scheduler, prices, tables, unrolled, every, decoded)
    return Case(request, *known, patience=patience or Patience())


class Cases:
    """A graph on every mesh of a request, each made once, whatever is then asked within a limit."""

    def __init__(self, graph: Graph, request: ResolvedRequest) -> None:
        self.scheduler = Scheduler(graph, request.subdims_of(graph), request.cluster)
        models = [request.pricing.model(request.cluster, mesh) for mesh in request.meshes]
        self.prices = [
            EdgePrices(mesh, model, request.micro_batches)
            for mesh, model in zip(request.meshes, models, strict=True)
        ]
        self.patience = Patience()
        self._made: dict[tuple[int, Regions], Case] = {}
        self._stated: dict[str, Regions] = {}

    @cached_property
    def blocks(self) -> Regions:
        """What may be recomputed."""
        return self.recomputed_by("always")

    def recomputed_by(self, word: Recompute) -> Regions:
        """What runs again by a word, whatever the memory: nothing where the plan decides."""
        policy = POLICIES.get(word)
        if policy is None:
            return KEEP_ALL
        if word not in self._stated:
            found = policy(self.scheduler.graph, self.scheduler.subdims)
            if not found and word != "always":
                raise InputError(f"recompute={word}: no repeated block of the model has such.")
            self._stated[word] = found
        return self._stated[word]

    def on(self, mesh: int, regions: Regions, request: ResolvedRequest) -> Case:
        """The graph on the mesh of this number; no good choice is known yet."""
        key = (mesh, regions)
        if key not in self._made:
            prices = self.prices[mesh]
            self._made[key] = make_case(request, self.scheduler, prices, regions, self.patience)
        return replace(self._made[key], request=request, known=[])


def discount(tables: Tables, problem: Problem, weight: float) -> Problem:
    """A problem made of these tables, with the edges of parameters at a part of their cost."""
    scaled: dict[int, Values] = {
        id(costs): costs * weight
        for edge, costs in zip(tables.edges, tables.problem.edge_costs, strict=True)
        if edge.regathers is not None
    }
    costs = tuple(scaled.get(id(table), table) for table in problem.edge_costs)
    return replace(problem, edge_costs=costs)


class Source(Enum):
    """Who proposed a candidate."""

    SEARCH = "search"  # the least additive cost within some limit
    OVERLAP = "overlap"  # the same, with the communication of parameters at a discount
    RECOMPUTE = "recompute"  # the same, with only some blocks recomputed
    SMALLEST = "smallest"  # the fewest bytes
    BASELINE = "baseline"  # a strategy that has a name
    REFINED = "refined"  # a few steps from another candidate
    METHOD = "method"  # another search, to compare with


@dataclass(frozen=True, eq=False)
class Candidate:
    """A choice for a case: who proposed it, its additive cost, and its step once simulated."""

    case: Case
    solution: Solution  # the choice with its additive cost and bytes, and a bound on all others
    source: Source = Source.SEARCH
    label: str = "search"
    least_bytes: float | None = None  # only where no choice for the case is within the limit
    simulation: Simulation | None = None
    host_seconds: float = 0.0  # of a simulated step: what the host takes to ask for all work
    byte_price: float = 0.0  # seconds that a byte more would save, where something is recomputed

    @property
    def choice(self) -> Sequence[int]:
        """A choice for every vertex of the unrolled problem."""
        return self.solution.choice

    @property
    def own_choice(self) -> tuple[int, ...]:
        """The choice for what is in the tables; the other periods of a run follow."""
        return tuple(self.choice[: len(self.case.tables.vertices)])

    @property
    def feasible(self) -> bool:
        """Whether some choice for the case is within the limit, as far as is known."""
        return self.least_bytes is None

    @property
    def mesh(self) -> str:
        """The mesh by its sizes."""
        return str(self.case.mesh)

    @property
    def micro_batches(self) -> int:
        """Of a step."""
        return self.case.tables.micro_batches

    @property
    def seconds(self) -> float:
        """The step: simulated, or the additive cost where it was not."""
        found = self.simulation
        return self.solution.cost if found is None else found.step_seconds

    @property
    def peak_bytes(self) -> float:
        """What a device holds at most: simulated, or the sum of bytes where it was not."""
        found = self.simulation
        return self.summed_bytes if found is None else found.peak_bytes

    @property
    def summed_bytes(self) -> float:
        """What the search bounds: the sum of bytes, and what every choice has."""
        return (self.solution.bytes or 0.0) + self.case.fixed_bytes

    @cached_property
    def unhidden_seconds(self) -> float:
        """All but the communication of parameters: no simulated step is shorter."""
        return self.case.unhidden.total(self.choice)

    @cached_property
    def floor_seconds(self) -> float:
        """No simulated step is shorter than this, nor is any with more recomputed."""
        if self.case.recomputed:
            return self.unhidden_seconds
        case = self.case
        asked = case.demands.least_seconds(case.unrolled, np.array(self.choice))
        return max(self.unhidden_seconds, asked)

    def may_beat(self, seconds: float) -> bool:
        """Whether the simulated step may be shorter; what is cheap to know is looked at first."""
        return self.unhidden_seconds < seconds and self.floor_seconds < seconds

    def choosing(self, choice: Sequence[int] | Ints, source: Source, label: str) -> Candidate:
        """Another choice for the same case, with its additive cost."""
        whole = np.array(choice)
        self.case.known.append(whole)
        bound = self.solution.lower_bound
        found = unproven(self.case.unrolled.problem, whole, source.value, bound)
        return Candidate(self.case, found, source, label, byte_price=self.byte_price)

    @cached_property
    def kinds_of_splits(self) -> int:
        """In how many ways products are split and parameters stored: fewer are easier to grasp."""
        tables, copied = self.case.tables, self.case.unrolled.vertices
        own = np.arange(len(self.choice)) if copied is None else copied
        found: set[object] = set()
        for v, row in set(zip(own.tolist(), self.choice, strict=True)):
            vertex = tables.vertices[v]
            if vertex.storage is not None:
                split = vertex.storage.layouts[row] >= 0
                found.add((bool(vertex.storage.regathers[row]), tuple(split.tolist())))
            elif vertex.space is not None and vertex.space.rule.rule.engine == "matrix":
                rule = vertex.space.rule
                factors = vertex.space.configs[row].tolist()
                found.add(tuple(rule.base(f) if f >= 0 else f for f in factors))
        return len(found)

    def schedule(self) -> Schedule:
        """The tasks of a step."""
        return self.case.scheduler.schedule(self.case.decode(self.choice))


def simulate(candidate: Candidate) -> Candidate:
    """The candidate with its step: communication beside work, and memory over time."""
    if candidate.simulation is not None:
        return candidate
    known, choice = candidate.case.findings.simulations, tuple(candidate.choice)
    if choice not in known:
        found = passes(candidate.schedule())
        known[choice] = whole_step(found), sum(each.count * each.host_seconds for each in found)
    simulation, host_seconds = known[choice]
    return replace(candidate, simulation=simulation, host_seconds=host_seconds)
