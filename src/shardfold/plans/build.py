"""From the winning choice to a plan: decisions in words, the estimate, the baselines."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from shardfold.cluster import Cluster
from shardfold.costs import Optimizer
from shardfold.costs.recompute import in_model
from shardfold.graph import Graph
from shardfold.planner.mesh_search import Chosen
from shardfold.planner.planner import Decision
from shardfold.planner.select import KNOWN, Judged, Verdict
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
    model: str = "",
    verdict: Verdict | None = None,
    free: Decision | None = None,
    cuts: Mapping[str, tuple[str, int]] | None = None,
) -> Plan:
    """Put the decisions, their estimate and what was asked for into a plan.

    With the simulator's verdict, the plan has its figures and the finalists', too; with pins, what
    they cost against the decision that is `free` of them. `cuts` are the inputs that are cut into
    micro-batches, by name: their places, and the dims.
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
                c.solution.cost if verdict is None else verdict.best_on(str(c.mesh)),
                c.solution.cost,
                c.solution.lower_bound,
                bool(c.tabulated.regions),
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
            model=model,
        ),
        inputs=inputs_of(assembly, cuts or {}),
        pinned=None if free is None else _pinned(graph, operators, chosen, verdict, free),
        recompute=tuple((r.start, r.stop) for r in in_model(best.tabulated.regions, graph).ranges),
        sketch=sketch(whole),
        simulation=None if verdict is None else verdict.winner.simulation,
        finalists=() if verdict is None else _finalists(verdict),
        schedule=Scheduler(graph, subdims, cluster).schedule(whole),
        micro_batches=best.tabulated.passes,
    )


def _pinned(
    graph: Graph,
    operators: Sequence[OperatorEntry],
    chosen: Chosen,
    verdict: Verdict | None,
    free: Decision,
) -> Pinned:
    """The pins with the number of operators that follow each, and the best without them."""
    entries = []
    for pin in chosen.pins:
        named = [index for group in matching(pin.pattern, graph) for index in group]
        count = sum(pin.allows(operators[index].split) for index in named)
        entries.append(PinEntry(pin.pattern, pin.split, count))
    own = chosen.best.solution.cost
    steps = [free.step_seconds, own if verdict is None else verdict.winner.rank]
    sums = [(free.searched or free.chosen).best.solution.cost, own]
    # Where neither search is proven, the one with pins may have found more.
    both_fit = chosen.smallest_bytes is None and free.chosen.smallest_bytes is None
    best = (min(steps), min(sums)) if both_fit else (steps[0], sums[0])
    return Pinned(tuple(entries), *best)


def _finalists(verdict: Verdict) -> tuple[FinalistEntry, ...]:
    """The best of each name, the fastest first."""
    found = []
    for name, judged in verdict.by_name().items():
        candidate, figures = judged.finalist.candidate, judged.simulation
        found.append(
            FinalistEntry(
                name,
                str(candidate.mesh),
                figures.step_seconds,
                candidate.solution.cost,
                figures.exposed_seconds,
                figures.peak_bytes,
                figures.mfu,
                bool(candidate.tabulated.regions),
                judged.finalist.is_by_hand,
            )
        )
    return tuple(sorted(found, key=lambda entry: entry.step_seconds))


@dataclass(frozen=True, slots=True)
class _Baseline:
    """A strategy that everybody knows: its step and its peak, both with or without recomputing."""

    seconds: float
    bytes: float
    recomputes: bool


def _simulated(judged: Judged) -> _Baseline:
    figures, tables = judged.simulation, judged.finalist.candidate.tabulated
    return _Baseline(figures.step_seconds, figures.peak_bytes, bool(tables.regions))


def _summed(whole: Whole, chosen: Chosen, by_hand: Callable[..., tuple[int, ...]]) -> _Baseline:
    """By the sums of seconds and bytes, on the plan's own tables."""
    tables, unfolded = chosen.best.tabulated, chosen.best.unfolded
    batch = batch_factors(whole.assembly.graph, whole.assembly.subdims)
    choice = unfolded.extended(by_hand(tables, batch))
    total, peak = unfolded.problem.total(choice), unfolded.problem.total_bytes(choice)
    return _Baseline(total, peak, bool(tables.regions))


def _estimate(whole: Whole, chosen: Chosen, cluster: Cluster, verdict: Verdict | None) -> Estimate:
    """The winner's figures, and those of the two strategies that everybody knows.

    They are of simulated steps, else the sums that the search minimises.
    """
    best, totals = chosen.best.solution, whole.totals()
    if verdict is None:
        step, peak = best.cost, chosen.best.unfolded.problem.total_bytes(best.choice)
        plain, sharded = (_summed(whole, chosen, each) for each in (data_parallel, fully_sharded))
    else:
        figures, known = verdict.winner.simulation, verdict.by_name()
        step, peak = figures.step_seconds, figures.peak_bytes
        plain, sharded = (_simulated(known[name]) for name in KNOWN)
    return Estimate(
        step_seconds=step,
        additive_seconds=best.cost,
        additive_lower_bound_seconds=chosen.lower_bound,
        optimal=chosen.is_optimal,
        compute_seconds=totals["compute"],
        communication_seconds=totals["communication"],
        update_seconds=totals["update"],
        data_parallel_seconds=plain.seconds,
        data_parallel_bytes=plain.bytes,
        fully_sharded_seconds=sharded.seconds,
        fully_sharded_bytes=sharded.bytes,
        peak_bytes=peak,
        device_bytes=cluster.device.memory_bytes,
        limit_bytes=chosen.limit_bytes,
        data_parallel_recomputes=plain.recomputes,
        fully_sharded_recomputes=sharded.recomputes,
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
