"""The pipeline on one screen: from a module and a cluster to the best plan."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from shardfold.cluster import Cluster, Mesh, mesh_from_text, parse
from shardfold.costs import CostModel, Tabulated, optimizer_named, pricing_named, tabulate
from shardfold.graph import Graph
from shardfold.plans import (
    Assembly,
    Estimate,
    MeshEntry,
    Plan,
    Provenance,
    data_parallel,
    fully_sharded,
)
from shardfold.plans.plan import VERSION, AxisEntry
from shardfold.plans.store import FORMAT
from shardfold.search import Solution, solve
from shardfold.spaces import Maker, atomise, rules_of
from shardfold.spaces.words import batch_classes

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the planner is: the name of the stage, and how much of it is done."""

    name: str
    done: int
    total: int


Watch = Callable[[Stage], None]


def ignore(stage: Stage) -> None:
    """A watch that looks away."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The best choice on one mesh."""

    mesh: Mesh
    model: CostModel
    tabulated: Tabulated
    solution: Solution


def plan(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: str | Cluster,
    dtype: str | None = None,
    optimizer: str = "adamw",
    mesh: str | Mesh | None = None,
    cost: str = "roofline",
    loss: Callable[[Any], Any] | None = None,
    rules: Mapping[str, Maker] | None = None,
    watch: Watch = ignore,
) -> Plan:
    """Find the fastest way to train `model` on `cluster`, and prove that it is.

    `args` and `kwargs` are an example batch, as `model` takes it; nothing is run and no weight is
    allocated. `cluster` is a name such as `4x8xh100`, a path to a cluster file, or a `Cluster`.
    `mesh` (such as `8x4`) fixes what is otherwise tried; `rules` adds rules for operators that
    shardfold does not know.
    """
    from shardfold.capture import capture

    target = parse(cluster) if isinstance(cluster, str) else cluster
    meshes = _meshes(target, mesh)
    pricing = pricing_named(cost)
    updates = optimizer_named(optimizer)

    started = time.perf_counter()
    watch(Stage("capture", 0, 1))
    graph = capture(model, args, kwargs, dtype=dtype, loss=loss)
    captured = time.perf_counter()

    atoms = atomise(graph, rules_of(graph, {**pricing.rules, **(rules or {})}))
    best: Candidate | None = None
    tried: list[MeshEntry] = []
    for number, candidate_mesh in enumerate(meshes):
        watch(Stage("search", number, len(meshes)))
        prices = pricing.model(target, candidate_mesh)
        tables = tabulate(graph, atoms, candidate_mesh, prices, updates)
        found = solve(tables.problem)
        tried.append(MeshEntry(str(candidate_mesh), found.cost, found.lower_bound))
        if best is None or found.cost < best.solution.cost:
            best = Candidate(candidate_mesh, prices, tables, found)
    assert best is not None
    watch(Stage("search", len(meshes), len(meshes)))
    searched = time.perf_counter()

    provenance = Provenance(
        graph=graph.digest(),
        operators=len(graph.ops),
        parameters=_parameter_count(graph),
        cluster=target.as_plain(),
        cost=cost,
        optimizer=optimizer,
        dtype=dtype or "as in the model",
        versions=_versions(),
        capture_seconds=captured - started,
        search_seconds=searched - captured,
    )
    assembly = Assembly(graph, atoms, best.tabulated, best.solution.choice, best.model, updates)
    return _describe(assembly, best, tried, target, provenance)


def _describe(
    assembly: Assembly,
    best: Candidate,
    tried: list[MeshEntry],
    cluster: Cluster,
    provenance: Provenance,
) -> Plan:
    """Put the decisions, their estimate and the baselines into a plan."""
    problem = best.tabulated.problem
    batch = batch_classes(assembly.graph, assembly.atoms)
    plain, sharded = (choose(best.tabulated, batch) for choose in (data_parallel, fully_sharded))
    totals = assembly.totals()
    estimate = Estimate(
        step_seconds=best.solution.cost,
        compute_seconds=totals["compute"],
        communication_seconds=totals["communication"],
        update_seconds=totals["update"],
        data_parallel_seconds=problem.total(plain),
        fully_sharded_seconds=problem.total(sharded),
        lower_bound_seconds=min(entry.lower_bound_seconds for entry in tried),
        optimal=best.solution.is_optimal,
        peak_bytes=problem.total_bytes(best.solution.choice),
        data_parallel_bytes=problem.total_bytes(plain),
        fully_sharded_bytes=problem.total_bytes(sharded),
        device_bytes=cluster.device.memory_bytes,
    )
    return Plan(
        format=FORMAT,
        version=VERSION,
        cluster=cluster.name,
        mesh=tuple(
            AxisEntry(axis.name, axis.size, cluster.levels[axis.level].name)
            for axis in best.mesh.axes
        ),
        estimate=estimate,
        meshes=tuple(tried),
        unsplit=assembly.unsplit(best.solution.cost),
        operators=assembly.operators(),
        tensors=assembly.tensors(),
        parameters=assembly.parameters(),
        provenance=provenance,
    )


def _meshes(cluster: Cluster, mesh: str | Mesh | None) -> tuple[Mesh, ...]:
    if mesh is None:
        return cluster.meshes()
    return (mesh_from_text(mesh, cluster) if isinstance(mesh, str) else mesh,)


def _parameter_count(graph: Graph) -> int:
    from math import prod

    return sum(prod(graph.tensors[i].type.shape) for i in graph.parameters())


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("shardfold", "torch", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found
