"""The stages of a plan over time: a track for each part of the cluster."""

from __future__ import annotations

import msgspec

from shardfold.errors import PlanError
from shardfold.pipeline import Pipeline, StageTimes, timeline
from shardfold.plans.plan import Plan
from shardfold.simulate import Span, Timeline


def stage_timeline(plan: Plan) -> Timeline:
    """Forward and backward of every micro-batch on every part; gaps are the bubble."""
    entry = plan.pipeline
    if entry is None or not entry.seconds:
        raise PlanError("The plan does not hold what its stages take. Plan again.")
    pipeline = Pipeline(entry.schedule, entry.parts, plan.micro_batches, entry.chunks)
    stages = [StageTimes(**msgspec.structs.asdict(each)) for each in entry.seconds]
    tied = [(each.parts, each.seconds) for each in entry.tied]
    names = tuple(f"part {number + 1}" for number in range(entry.parts))
    spans = tuple(
        Span(
            stream=names[turn.device],
            operator=turn.what,
            block="",
            phase=turn.phase,
            kind=turn.phase,
            start_seconds=turn.start,
            end_seconds=turn.end,
            bytes=0.0,
            exposed_seconds=0.0,
        )
        for turn in timeline(pipeline, stages, tied)
    )
    return Timeline(names, spans, ())
