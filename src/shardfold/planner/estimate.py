"""What a stated strategy comes to: its step, its memory, and what communication it waits for.

The splits are priced and simulated as the planner's own (`stated_run.py`); the stages of a pipeline
are in `staged.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardfold.errors import InputError
from shardfold.graph import Graph
from shardfold.planner.batch_slices import items_of
from shardfold.planner.case import ResolvedRequest
from shardfold.planner.estimated import Communication, Estimated
from shardfold.planner.staged import Staged, stage
from shardfold.planner.stated_run import Run, run_stated
from shardfold.simulate import Exposed
from shardfold.simulate import simulate as run_schedule
from shardfold.strategies.stacks import OWN, Stack
from shardfold.strategies.stated import Stated


def estimate(
    graph: Graph,
    request: ResolvedRequest,
    stated: Stated,
    stack: Stack = OWN,
    run_on: Run = run_stated,
) -> Estimated:
    """Price a strategy as a stack runs it; `graph` is of one of its micro-batches.

    `run_on` chooses the splits: whoever prices many strategies may keep what they share.
    """
    check_overlap(request)
    if stated.stages > 1:
        return _of_stages(request, stated, stage(graph, request, stated, stack, run_on))
    run = run_on(graph, request, stated, stack)
    schedule = run.schedule()
    found = run_schedule(schedule)
    useful, again = schedule.flops, run.recomputed_flops(schedule)
    rate, unit = _rate(graph, stated, found.step_seconds)
    return Estimated(
        strategy=str(stated),
        cluster=request.cluster.name,
        devices=run.mesh.size,
        mesh=str(run.mesh),
        step_seconds=found.step_seconds,
        compute_seconds=found.compute_seconds,
        rate=rate,
        unit=unit,
        mfu=found.mfu,
        hfu=found.mfu * (1 + again / useful) if useful else found.mfu,
        peak_bytes=found.peak_bytes,
        peak_by_class=found.peak_by_class,
        limit_bytes=request.limit,
        communication=_by_kind((each, 1.0) for each in found.collectives),
    )


def check_overlap(request: ResolvedRequest) -> None:
    """Refuse a cost model that knows no overlap: a step, or another stack's, cannot be told."""
    if not request.pricing.overlaps:
        raise InputError(
            "A stated configuration, or another stack's, is simulated with overlap, which this "
            "cost model does not know. Ask for one that does: --cost kernels or --cost roofline."
        )


def _of_stages(request: ResolvedRequest, stated: Stated, found: Staged) -> Estimated:
    run, step = found.run, found.step_seconds
    rate, unit = _rate(run.graph, stated, step)
    sent = Communication("send_recv", found.send_seconds, found.exposed_send_seconds)
    peak = max(found.peaks, key=lambda each: sum(each.values()))
    return Estimated(
        strategy=str(stated),
        cluster=request.cluster.name,
        devices=request.cluster.size,
        mesh=f"{stated.stages} stages of {run.mesh}",
        step_seconds=step,
        compute_seconds=found.compute_seconds,
        rate=rate,
        unit=unit,
        mfu=found.flops / (step * found.peak_flops),
        hfu=(found.flops + found.flops_again) / (step * found.peak_flops),
        peak_bytes=sum(peak.values()),
        peak_by_class=peak,
        limit_bytes=request.limit,
        communication=(*_by_kind(found.collectives), sent),
        pipeline=found.pipelined,
    )


def _rate(graph: Graph, stated: Stated, step_seconds: float) -> tuple[float, str]:
    """Tokens or samples in a second, and which of them."""
    count, unit = items_of(graph)
    return count * stated.micro_batches / step_seconds, unit


def _by_kind(found: Iterable[tuple[Exposed, float]]) -> tuple[Communication, ...]:
    """The collectives of each kind, each with its weight."""
    kinds: dict[str, list[float]] = {}
    for each, weight in found:
        total = kinds.setdefault(each.kind, [0.0, 0.0])
        total[0] += each.seconds * weight
        total[1] += each.exposed_seconds * weight
    return tuple(Communication(kind, *total) for kind, total in sorted(kinds.items()))
