"""From the winning choice to a plan: decisions in words, the estimate, the baselines."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from shardfold.cluster import Cluster
from shardfold.costs import Optimizer
from shardfold.costs.recompute import in_model
from shardfold.graph import Graph
from shardfold.planner.mesh_search import Chosen
from shardfold.planner.select import Verdict
from shardfold.plans.batch import inputs_of
from shardfold.plans.drawing_data import sketch
from shardfold.plans.entries import every_operator, every_parameter, every_tensor, unsplit_entries
from shardfold.plans.files import FORMAT
from shardfold.plans.plan import (
    VERSION,
    AxisEntry,
    Estimate,
    FinalistEntry,
    MeshEntry,
    OperatorEntry,
    PinEntry,
    Pinned,
    Plan,
    Provenance,
)
from shardfold.plans.request import Request
from shardfold.sharding import Subdims
from shardfold.simulate.decoded import Assembly
from shardfold.simulate.tasks import Scheduler
from shardfold.simulate.unrolled import Whole
from shardfold.strategies.baselines import batch_factors, data_parallel, fully_sharded
from shardfold.strategies.pins import matching


def describe(
    graph: Graph,
    subdims: Subdims,
    cluster: Cluster,
    chosen: Chosen,
    optimizer: Optimizer,
    *,
    request: Request,
    capture_seconds: float,
    search_seconds: float,
    verdict: Verdict | None = None,
    cuts: Mapping[str, tuple[str, int]] | None = None,
) -> Plan:
    """Put the decisions, their estimate and what was asked for into a plan.

    With the simulator's verdict, the plan has its figures and the finalists', too. `cuts` are the
    inputs that are cut into micro-batches, by name: their places, and the dims.
    """
    best = chosen.best
    assembly = Assembly(graph, subdims, best.tabulated, best.own_choice, best.model, optimizer)
    whole = Whole(assembly, best.unfolded, np.array(best.solution.choice))
    operators, parameters = every_operator(whole), every_parameter(whole)
    return Plan(
        format=FORMAT,
        version=VERSION,
        cluster=cluster.name,
        mesh=tuple(
            AxisEntry(axis.name, axis.size, cluster.levels[axis.level].name)
            for axis in best.mesh.axes
        ),
        estimate=_estimate(whole, chosen, cluster, verdict),
        meshes=tuple(
            MeshEntry(
                str(c.mesh),
                c.solution.cost,
                c.solution.lower_bound,
                bool(c.tabulated.regions),
                None if verdict is None else verdict.best_on(str(c.mesh)),
            )
            for c in chosen.best_by_mesh()
        ),
        unsplit=unsplit_entries(whole, best.solution.cost),
        operators=operators,
        tensors=every_tensor(whole),
        parameters=parameters,
        provenance=Provenance(
            graph=graph.digest(),
            operators=len(operators),
            parameters=sum(math.prod(entry.shape) for entry in parameters),
            cluster=cluster.as_plain(),
            request=request,
            versions=_versions(),
            capture_seconds=capture_seconds,
            search_seconds=search_seconds,
            notes=graph.notes,
        ),
        inputs=inputs_of(assembly, cuts or {}),
        pinned=_pinned(graph, operators, chosen),
        recompute=tuple((r.start, r.stop) for r in in_model(best.tabulated.regions, graph).ranges),
        sketch=sketch(whole),
        simulation=None if verdict is None else verdict.winner.simulation,
        finalists=() if verdict is None else _finalists(verdict),
        schedule=Scheduler(graph, subdims, cluster).schedule(whole),
        micro_batches=best.tabulated.passes,
    )


def _pinned(graph: Graph, operators: Sequence[OperatorEntry], chosen: Chosen) -> Pinned | None:
    """The pins with the number of operators that follow each, and the best step without them."""
    if chosen.free is None:
        return None
    entries = []
    for pin in chosen.pins:
        named = [index for group in matching(pin.pattern, graph) for index in group]
        count = sum(pin.allows(operators[index].split) for index in named)
        entries.append(PinEntry(pin.pattern, pin.split, count))
    # Where neither search is proven, the one with pins may have found more.
    free, pinned = chosen.free.best.solution.cost, chosen.best.solution.cost
    both_fit = chosen.smallest_bytes is None and chosen.free.smallest_bytes is None
    return Pinned(tuple(entries), min(free, pinned) if both_fit else free)


def _finalists(verdict: Verdict) -> tuple[FinalistEntry, ...]:
    """The best of each name, the fastest first."""
    found = []
    for name, judged in verdict.by_name().items():
        candidate, figures = judged.finalist.candidate, judged.simulation
        found.append(
            FinalistEntry(
                name,
                str(candidate.mesh),
                candidate.solution.cost,
                figures.step_seconds,
                figures.exposed_seconds,
                figures.peak_bytes,
                figures.mfu,
                bool(candidate.tabulated.regions),
            )
        )
    return tuple(sorted(found, key=lambda entry: entry.simulated_seconds))


def _estimate(whole: Whole, chosen: Chosen, cluster: Cluster, verdict: Verdict | None) -> Estimate:
    """The winner's figures, and those of the two strategies that everybody knows.

    Bytes are peaks where the step was simulated, else the sums that the search minimises within.
    """
    tabulated, unfolded = chosen.best.tabulated, chosen.best.unfolded
    problem = unfolded.problem
    batch = batch_factors(whole.assembly.graph, whole.assembly.subdims)
    plain, sharded = (
        unfolded.extended(by_hand(tabulated, batch)) for by_hand in (data_parallel, fully_sharded)
    )
    totals = whole.totals()
    peaks = {} if verdict is None else verdict.peaks()
    sums = (problem.total_bytes(each) for each in (chosen.best.solution.choice, plain, sharded))
    own, plain_bytes, sharded_bytes = sums
    return Estimate(
        step_seconds=chosen.best.solution.cost,
        compute_seconds=totals["compute"],
        communication_seconds=totals["communication"],
        update_seconds=totals["update"],
        data_parallel_seconds=problem.total(plain),
        fully_sharded_seconds=problem.total(sharded),
        lower_bound_seconds=chosen.lower_bound,
        optimal=chosen.is_optimal,
        peak_bytes=own if verdict is None else verdict.winner.simulation.peak_bytes,
        data_parallel_bytes=peaks.get("data-parallel", plain_bytes),
        fully_sharded_bytes=peaks.get("zero-3", sharded_bytes),
        device_bytes=cluster.device.memory_bytes,
        limit_bytes=chosen.limit_bytes,
        min_feasible_bytes=chosen.smallest_bytes,
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("shardfold", "torch", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found
