"""From the winning choice to a plan: decisions in words, the estimate, the baselines."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

import msgspec

from shardfold.costs.activations import in_model
from shardfold.planner.case import Source
from shardfold.planner.options import Request
from shardfold.planner.pipeline_plan import PipelinePlan
from shardfold.planner.pipelines import SearchedPipelines
from shardfold.planner.proposals import KNOWN
from shardfold.planner.select import Selection
from shardfold.plans.batch import inputs_of
from shardfold.plans.drawing_data import sketch
from shardfold.plans.entries import (
    every_operator,
    every_parameter,
    every_tensor,
    experiment_entries,
    unsplit_entries,
)
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
    PipelineEntry,
    Plan,
    Provenance,
    StageEntry,
    StageSeconds,
    TiedSum,
)
from shardfold.plans.wholes import Joined, Whole, joined
from shardfold.search import Solution
from shardfold.simulate.decoded import UnrolledChoice
from shardfold.strategies.baselines import batch_factors, fully_sharded, replicated
from shardfold.strategies.pins import matching


def describe(
    selection: Selection,
    *,
    request: Request,
    capture_seconds: float,
    search_seconds: float,
    model: str = "",
    cuts: Mapping[str, tuple[str, int]] | None = None,
    pipelines: SearchedPipelines | None = None,
) -> Plan:
    """Put the decisions, their estimate and what was asked for into a plan.

    Where candidates were simulated, the plan has their figures, too; with pins, what they cost
    against the selection without. `cuts` are the inputs that are cut into micro-batches, by name:
    their places, and the dims. `pipelines` has the one that wins over the selection, if any does.
    """
    piped = None if pipelines is None else pipelines.plan
    winner = selection.winner if piped is None else piped.as_candidate
    case, cluster = winner.case, selection.winner.case.request.cluster
    whole = case.decode(winner.choice)
    operators, parameters = every_operator(whole), every_parameter(whole)
    tensors, recompute = every_tensor(whole), in_model(case.recomputed, case.graph)
    mixed = None if piped is None else _joined(piped, cuts or {})
    widest = (whole, winner.solution.cost)
    if piped is not None and mixed is not None:
        widest = _widest(piped)
        operators, parameters = mixed.operators, mixed.parameters
        tensors, recompute = mixed.tensors, mixed.recompute
    estimate = (
        _estimate(whole, selection)
        if piped is None
        else _piped_estimate(whole, selection, piped, winner.solution)
    )
    bound = None if pipelines is None else pipelines.bound_seconds
    return Plan(
        format=FORMAT,
        version=VERSION,
        cluster=cluster.name,
        mesh=tuple(
            AxisEntry(axis.name, axis.size, case.request.cluster.levels[axis.level].name)
            for axis in case.mesh.axes
        ),
        estimate=msgspec.structs.replace(estimate, pipeline_lower_bound_seconds=bound),
        meshes=tuple(
            MeshEntry(
                str(c.case.mesh),
                selection.best_on(str(c.case.mesh)) if selection.simulated else c.solution.cost,
                c.solution.cost,
                c.solution.lower_bound,
                bool(c.case.recomputed),
            )
            for c in selection.best_by_mesh()
        ),
        unsplit=unsplit_entries(*widest),
        operators=operators,
        tensors=tensors,
        parameters=parameters,
        provenance=Provenance(
            graph=case.graph.digest(),
            operators=len(operators),
            parameters=sum(math.prod(entry.shape) for entry in parameters),
            cluster=cluster.as_plain(),
            request=request,
            versions=installed_versions("shardfold", "torch", "numpy"),
            capture_seconds=capture_seconds,
            search_seconds=search_seconds,
            notes=case.graph.notes,
            model=model,
        ),
        inputs=inputs_of(whole.decoded, cuts or {}),
        pinned=_pinned(operators, selection),
        recompute=recompute,
        sketch=sketch(whole) if mixed is None else None,  # which is of one choice
        simulation=winner.simulation if piped is None else piped.simulation,
        finalists=_finalists(selection, piped),
        schedule=winner.schedule() if piped is None else None,
        micro_batches=case.tables.micro_batches,
        experiments=experiment_entries(whole),
        pipeline=None if piped is None else _pipeline(piped, mixed),
    )


def _widest(piped: PipelinePlan) -> tuple[UnrolledChoice, float]:
    """Of the choices that parts follow, that of the most devices, which could split the most."""
    plan = max(piped.followed, key=lambda each: each.candidate.case.mesh.size)
    candidate = plan.as_candidate
    return candidate.case.decode(candidate.choice), candidate.solution.cost


def _joined(piped: PipelinePlan, cuts: Mapping[str, tuple[str, int]]) -> Joined | None:
    """The entries of a pipeline whose parts follow choices of their own."""
    if not piped.followed:
        return None
    staged, wholes = piped.staged, []
    choices = list(dict.fromkeys(piped.followed))
    for plan in choices:
        candidate = plan.as_candidate
        whole = candidate.case.decode(candidate.choice)
        wholes.append(Whole.of(whole, candidate.case.request.cluster, cuts))
    stages = range(staged.pipeline.stages)
    chosen = [choices.index(piped.followed[staged.pipeline.device_of(s)]) for s in stages]
    return joined(wholes, staged.layers.begins(staged.counts), chosen)


def _pipeline(piped: PipelinePlan, mixed: Joined | None) -> PipelineEntry:
    staged, choices = piped.staged, list(dict.fromkeys(piped.followed))
    found = staged.pipelined
    return PipelineEntry(
        schedule=staged.pipeline.schedule,
        parts=staged.pipeline.devices,
        chunks=staged.pipeline.chunks,
        layers=tuple(staged.counts),
        bubble=found.bubble,
        stages=tuple(StageEntry(**asdict(each)) for each in found.stages),
        seconds=tuple(StageSeconds(**asdict(each)) for each in staged.times),
        tied=tuple(TiedSum(parts, seconds) for parts, seconds in staged.tied),
        choices=() if mixed is None else mixed.choices,
        follows=tuple(choices.index(plan) for plan in piped.followed),
    )


def _piped_estimate(
    whole: UnrolledChoice, selection: Selection, piped: PipelinePlan, solution: Solution
) -> Estimate:
    """The figures of a pipeline beside those of the baselines without stages.

    Sums are over all stages.
    """
    totals, followed = whole.totals(), piped.followed or (piped,)
    if piped.followed:
        totals = piped.staged.totals
    cost = sum(totals.values()) if piped.followed else solution.cost
    bound = min(plan.candidate.solution.lower_bound for plan in followed)
    return msgspec.structs.replace(
        _estimate(selection.winner.case.decode(selection.winner.choice), selection),
        step_seconds=piped.seconds,
        additive_seconds=cost,
        additive_lower_bound_seconds=min(bound, cost),
        optimal=False,
        compute_seconds=totals["compute"],
        communication_seconds=totals["communication"],
        update_seconds=totals["update"],
        peak_bytes=piped.peak_bytes,
        limit_bytes=piped.limit_bytes,
        min_feasible_bytes=None if piped.fits else selection.smallest_bytes,
        step_lower_bound_seconds=None,
    )


def _pinned(operators: Sequence[OperatorEntry], selection: Selection) -> Pinned | None:
    """The pins with the number of operators that follow each, and the best without them."""
    unpinned, own = selection.unpinned, selection.winner
    if not selection.pins or unpinned is None:
        return None
    entries = []
    for pin in selection.pins:
        groups = matching(pin.pattern, own.case.graph)
        named = [index for group in groups for index in group]
        count = sum(pin.allows(operators[index].split) for index in named)
        entries.append(PinEntry(pin.pattern, pin.split, count))
    steps = [unpinned.winner.seconds, own.seconds]
    sums = [unpinned.additive.solution.cost, own.solution.cost]
    # Where neither search is proven, the one with pins may have found more.
    both_fit = selection.smallest_bytes is None and unpinned.smallest_bytes is None
    best = (min(steps), min(sums)) if both_fit else (steps[0], sums[0])
    return Pinned(tuple(entries), *best)


def _finalists(selection: Selection, piped: PipelinePlan | None) -> tuple[FinalistEntry, ...]:
    """The best simulated candidate of each label, the fastest first."""
    found = [] if piped is None else [_piped_finalist(piped)]
    for label, candidate in selection.best_by_label().items():
        figures = candidate.simulation
        if figures is not None:
            found.append(
                FinalistEntry(
                    label,
                    str(candidate.case.mesh),
                    figures.step_seconds,
                    candidate.solution.cost,
                    figures.exposed_seconds,
                    figures.peak_bytes,
                    figures.mfu,
                    bool(candidate.case.recomputed),
                    candidate.source.value,
                )
            )
    return tuple(sorted(found, key=lambda entry: entry.step_seconds))


def _piped_finalist(piped: PipelinePlan) -> FinalistEntry:
    figures, case = piped.simulation, piped.candidate.case
    return FinalistEntry(
        f"{piped.staged.pipeline.devices} stages, {piped.staged.pipeline.schedule}",
        str(case.mesh),
        figures.step_seconds,
        piped.candidate.solution.cost,
        figures.exposed_seconds,
        figures.peak_bytes,
        figures.mfu,
        bool(case.recomputed),
        "pipeline",
    )


def _estimate(whole: UnrolledChoice, selection: Selection) -> Estimate:
    """The winner's figures, and those of the two baselines that everybody knows.

    They are of simulated steps, else the sums that the search minimises.
    """
    winner, case, totals = selection.winner, selection.winner.case, whole.totals()
    if selection.simulated:
        known = selection.best_by_label()
        plain, sharded = (known[name] for name in KNOWN)
    else:
        batch = batch_factors(case.graph, case.subdims)
        choices = (each(case.tables, batch) for each in (replicated, fully_sharded))
        plain, sharded = (
            winner.choosing(case.unrolled.extended(choice), Source.BASELINE, name)
            for name, choice in zip(KNOWN, choices, strict=True)
        )
    return Estimate(
        step_seconds=winner.seconds,
        additive_seconds=winner.solution.cost,
        additive_lower_bound_seconds=selection.lower_bound,
        optimal=selection.is_optimal,
        compute_seconds=totals["compute"],
        communication_seconds=totals["communication"],
        update_seconds=totals["update"],
        data_parallel_seconds=plain.seconds,
        data_parallel_bytes=plain.peak_bytes,
        fully_sharded_seconds=sharded.seconds,
        fully_sharded_bytes=sharded.peak_bytes,
        peak_bytes=winner.peak_bytes,
        device_bytes=case.request.cluster.device.memory_bytes,
        limit_bytes=selection.limit_bytes,
        data_parallel_recomputes=bool(plain.case.recomputed),
        fully_sharded_recomputes=bool(sharded.case.recomputed),
        min_feasible_bytes=selection.smallest_bytes,
        step_lower_bound_seconds=selection.step_lower_bound,
        gib_price_seconds=winner.byte_price * 2**30,
    )


def installed_versions(*packages: str) -> dict[str, str]:
    """Of Python and of packages; a package that runs from its sources has none."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found
