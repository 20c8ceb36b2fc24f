"""The best choice over all meshes of a cluster, within the memory of a device.

Each mesh is first solved without the limit: that is fast, proven, and a lower bound for whatever
the limit allows. Only meshes that could still win are then solved within the limit, first with all
activations kept, then with repeated blocks recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal, get_args

from shardfold.cluster import Cluster, Mesh
from shardfold.costs import CostModel, Optimizer, Pricing, Tabulated, tabulate
from shardfold.costs.recompute import KEEP_ALL, Regions, block_regions
from shardfold.costs.tables import EdgePrices
from shardfold.costs.unroll import Ints, Unfolded, unfold
from shardfold.errors import InfeasibleError
from shardfold.graph import Graph
from shardfold.planner.lower_bounds import least_seconds
from shardfold.search import Solution, unproven
from shardfold.search.subproblem import Restricted, restricted
from shardfold.sharding import Subdims
from shardfold.strategies.pins import Pin, Refusal, held, refused
from shardfold.strategies.split_names import Splits

Recompute = Literal["auto", "never", "always"]
RECOMPUTE = get_args(Recompute)
HINT = "Try more devices, a smaller batch, or a dtype with fewer bytes."
RESERVE = 0.1  # of a device's memory: fragments, workspaces, the framework itself


@dataclass(frozen=True, slots=True)
class Candidate:
    """The best choice found on one mesh."""

    mesh: Mesh
    model: CostModel
    tabulated: Tabulated
    solution: Solution
    left: Restricted  # the choices that pins leave: all, without any
    unfolded: Unfolded  # the problem with all periods of every run
    feasible: bool = True  # False: nothing on this mesh fits the memory limit
    known: list[Ints] = field(default_factory=list, compare=False)  # good choices, as they are met

    @property
    def own_choice(self) -> tuple[int, ...]:
        """The choice for what is in the tables; the other periods of a run follow."""
        return tuple(self.solution.choice[: len(self.tabulated.vertices)])


@dataclass(frozen=True, slots=True)
class Chosen:
    """The winner, what every mesh came to, and the least bytes that any choice needs."""

    best: Candidate
    tried: tuple[Candidate, ...]
    limit_bytes: float
    smallest_bytes: float | None = None  # only where nothing fits
    pins: tuple[Pin, ...] = ()
    floor_seconds: float | None = None  # where more ways exist than were tried: a bound on them

    @property
    def lower_bound(self) -> float:
        """No choice on any mesh that was tried costs less than this."""
        possible = [c for c in self.tried if c.feasible] or self.tried
        bounds = [candidate.solution.lower_bound for candidate in possible]
        return min(bounds if self.floor_seconds is None else [*bounds, self.floor_seconds])

    def best_by_mesh(self) -> list[Candidate]:
        """The winner of each mesh, over what is kept and what is recomputed."""
        found: dict[str, Candidate] = {}
        for candidate in self.tried:
            rank = (not candidate.feasible, candidate.solution.cost)
            known = found.get(str(candidate.mesh))
            if known is None or rank < (not known.feasible, known.solution.cost):
                found[str(candidate.mesh)] = candidate
        return list(found.values())

    @property
    def is_optimal(self) -> bool:
        """Whether the winner is proven to be the best."""
        cost = self.best.solution.cost
        return self.best.solution.is_optimal and self.lower_bound >= cost * (1 - 1e-9)


def choose(
    graph: Graph,
    subdims: Subdims,
    cluster: Cluster,
    meshes: Sequence[Mesh],
    pricing: Pricing,
    optimizer: Optimizer,
    limit_bytes: float | None,
    watch: Callable[[int, int], None],
    pins: Sequence[Pin] = (),
    recompute: Recompute = "auto",
    passes: int = 1,
) -> Chosen:
    """Solve on every mesh, and keep the fastest choice that fits.

    Without an explicit limit, the device's memory less a reserve binds where it can be met, and
    a model that cannot fit still gets its fastest plan, which says so.
    """
    limit = (1 - RESERVE) * cluster.device.memory_bytes if limit_bytes is None else limit_bytes

    def candidates(regions: Regions, cutoff: float = inf) -> list[Candidate]:
        found = []
        for number, mesh in enumerate(meshes):
            watch(number, 2 * len(meshes))
            model, prices = priced[number]
            tables = tabulate(graph, subdims, mesh, model, optimizer, regions, prices, passes)
            unfolded = unfold(tables, graph)
            every = Restricted(unfolded.problem, {})
            solution = _solved(every, cutoff)
            found.append(Candidate(mesh, model, tables, solution, every, unfolded))
        return found

    def recomputing(cutoff: float) -> list[Candidate]:
        regions = block_regions(graph, subdims) if recompute == "auto" else KEEP_ALL
        return candidates(regions, cutoff) if regions else []

    def best(prepare: Callable[[list[Candidate]], list[Candidate]]) -> Chosen:
        ways = _Ways(prepare(kept), lambda cutoff: prepare(recomputing(cutoff)))
        return _best(ways, limit, limit_bytes is not None, lambda n: watch(count + n, 2 * count))

    count = len(meshes)
    models = [pricing.model(cluster, mesh) for mesh in meshes]
    pairs = zip(meshes, models, strict=True)
    priced = [(model, EdgePrices(mesh, model, passes)) for mesh, model in pairs]
    kept = candidates(block_regions(graph, subdims) if recompute == "always" else KEEP_ALL)
    if not pins:
        return best(lambda found: found)
    return replace(best(lambda found: _pinned(found, pins, graph, subdims)), pins=tuple(pins))


def _solved(every: Restricted, cutoff: float) -> Solution:
    """The best choice; where none can be cheaper than `cutoff`, the smallest, with that proof."""
    floor = least_seconds(every.problem) if cutoff < inf else -inf
    if floor < cutoff:
        return every.solve()
    return unproven(every.problem, every.smallest().choice, "smallest", floor)


def _pinned(
    free: Sequence[Candidate], pins: Sequence[Pin], graph: Graph, subdims: Subdims
) -> list[Candidate]:
    """The candidates with the choices that the pins leave, on the meshes that allow them."""
    found: list[Candidate] = []
    refusals: dict[str, Refusal] = {}
    for candidate in free:
        tables = candidate.tabulated
        kept, refusal = held(pins, Splits(graph, subdims, candidate.mesh), tables)
        if refusal is not None:
            refusals[str(candidate.mesh)] = refusal
            continue
        left = restricted(tables.problem, kept)
        found.append(replace(candidate, left=left, solution=left.solve()))
    if refusals and not found:
        raise refused(refusals, graph)
    return found


@dataclass(frozen=True, slots=True)
class _Ways:
    """Candidates that keep all activations, and how to make those that recompute blocks."""

    keeping: Sequence[Candidate]
    recomputing: Callable[[float], Sequence[Candidate]]  # given a cost that another reaches


def _best(ways: _Ways, limit: float, is_given: bool, watch: Callable[[int], None]) -> Chosen:
    """The fastest that fits; where nothing does and no limit was given, the fastest.

    Recomputing only ever adds time, so it is looked at only where the limit binds.
    """
    fastest = min(ways.keeping, key=lambda c: c.solution.cost)
    if (fastest.solution.bytes or 0.0) <= limit:
        return Chosen(fastest, tuple(ways.keeping), limit)
    keeping = _within(ways.keeping, limit, watch)
    again = _within(ways.recomputing(keeping.best), limit, watch, keeping.best)
    best = min(keeping.best, again.best)
    if best == inf:
        needed = min(keeping.needed, again.needed)
        if is_given:
            raise InfeasibleError(needed_bytes=needed, limit_bytes=limit, hint=HINT)
        return Chosen(fastest, tuple(ways.keeping), limit, needed)
    # Recomputing some blocks and not others is not tried here, and costs no less than this.
    floor = fastest.solution.lower_bound if again.tried else None
    tried = (*keeping.tried, *again.tried)
    fitting = [c for c in tried if (c.solution.bytes or 0.0) <= limit]
    return Chosen(min(fitting, key=lambda c: c.solution.cost), tried, limit, floor_seconds=floor)


@dataclass(frozen=True, slots=True)
class _Within:
    """Candidates within the limit, the least cost among them, and the fewest bytes of others."""

    tried: tuple[Candidate, ...]
    best: float
    needed: float


def _within(
    free: Sequence[Candidate], limit: float, watch: Callable[[int], None], best: float = inf
) -> _Within:
    """The candidates, solved again within the limit where they exceed it and could still win."""
    ordered = sorted(range(len(free)), key=lambda k: free[k].solution.cost)
    found, needed = list(free), inf
    for number, k in enumerate(ordered):
        watch(number)
        solution, feasible = free[k].solution, True
        if (solution.bytes or 0.0) > limit and solution.cost < best:
            try:
                solution = free[k].left.solve(
                    limit, fastest=solution, cutoff=best, known=free[k].known
                )
            except InfeasibleError as error:
                needed, feasible = min(needed, error.needed_bytes), False
        fits = (solution.bytes or 0.0) <= limit
        best = min(best, solution.cost) if fits else best
        found[k] = replace(free[k], solution=solution, feasible=feasible)
    return _Within(tuple(found), best, needed)
