"""The best choice over all meshes of a cluster, within the memory of a device.

Each mesh is first solved without the limit: that is fast, proven, and a lower bound for whatever
the limit allows. Only meshes that could still win are then solved within the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardfold.cluster import Cluster, Mesh
from shardfold.costs import CostModel, Optimizer, Pricing, Tabulated, tabulate
from shardfold.errors import InfeasibleError
from shardfold.graph import Graph
from shardfold.search import Solution, solve
from shardfold.spaces import Atoms

RESERVE = 0.1  # of a device's memory: fragments, workspaces, the framework itself


@dataclass(frozen=True, slots=True)
class Candidate:
    """The best choice found on one mesh."""

    mesh: Mesh
    model: CostModel
    tabulated: Tabulated
    solution: Solution
    feasible: bool = True  # False: nothing on this mesh fits the memory limit


@dataclass(frozen=True, slots=True)
class Chosen:
    """The winner, what every mesh came to, and the least bytes that any choice needs."""

    best: Candidate
    tried: tuple[Candidate, ...]
    limit_bytes: float
    smallest_bytes: float | None = None  # only where nothing fits

    @property
    def lower_bound(self) -> float:
        """No choice on any mesh that was tried costs less than this."""
        possible = [c for c in self.tried if c.feasible] or self.tried
        return min(candidate.solution.lower_bound for candidate in possible)

    @property
    def is_optimal(self) -> bool:
        """Whether the winner is proven to be the best."""
        cost = self.best.solution.cost
        return self.best.solution.is_optimal and self.lower_bound >= cost * (1 - 1e-9)


def choose(
    graph: Graph,
    atoms: Atoms,
    cluster: Cluster,
    meshes: Sequence[Mesh],
    pricing: Pricing,
    optimizer: Optimizer,
    limit_bytes: float | None,
    watch: Callable[[int, int], None],
) -> Chosen:
    """Solve on every mesh, and keep the fastest choice that fits.

    Without an explicit limit, the device's memory less a reserve binds where it can be met, and
    a model that cannot fit still gets its fastest plan, which says so.
    """
    limit = (1 - RESERVE) * cluster.device.memory_bytes if limit_bytes is None else limit_bytes
    free = []
    for number, mesh in enumerate(meshes):
        watch(number, 2 * len(meshes))
        model = pricing.model(cluster, mesh)
        tables = tabulate(graph, atoms, mesh, model, optimizer)
        free.append(Candidate(mesh, model, tables, solve(tables.problem)))
    try:
        tried = _within(free, limit, lambda n: watch(len(meshes) + n, 2 * len(meshes)))
    except InfeasibleError as error:
        if limit_bytes is not None:
            raise
        best = min(free, key=lambda c: c.solution.cost)
        return Chosen(best, tuple(free), limit, error.needed_bytes)
    fitting = [c for c in tried if (c.solution.bytes or 0.0) <= limit]
    return Chosen(min(fitting, key=lambda c: c.solution.cost), tuple(tried), limit)


def _within(
    free: Sequence[Candidate], limit: float, watch: Callable[[int], None]
) -> list[Candidate]:
    """The candidates, solved again within the limit where they exceed it and could still win."""
    ordered = sorted(free, key=lambda c: c.solution.cost)
    found: dict[str, Candidate] = {}
    best, needed = float("inf"), float("inf")
    for number, candidate in enumerate(ordered):
        watch(number)
        solution, feasible = candidate.solution, True
        if (solution.bytes or 0.0) > limit and solution.cost < best:
            try:
                solution = solve(candidate.tabulated.problem, memory_limit=limit)
            except InfeasibleError as error:
                needed, feasible = min(needed, error.needed_bytes), False
        fits = (solution.bytes or 0.0) <= limit
        best = min(best, solution.cost) if fits else best
        found[str(candidate.mesh)] = replace(candidate, solution=solution, feasible=feasible)
    if best == float("inf"):
        raise InfeasibleError(
            needed_bytes=needed,
            limit_bytes=limit,
            hint="Try more devices, a smaller batch, or a dtype with fewer bytes.",
        )
    return [found[str(candidate.mesh)] for candidate in free]
