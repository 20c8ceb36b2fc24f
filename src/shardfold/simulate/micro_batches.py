"""Gradient accumulation: the schedules of a step's micro-batches, and their sum.

A step runs k micro-batches, each 1/k of the batch, and one update. Three kinds differ: the first
finds no gradients to add to; those between add theirs; the last also runs the delayed all-reduces,
and updates. Each kind is simulated once:

    step = first + (k - 2) * between + last

Micro-batches do not overlap: forward waits for the reductions of the backward before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from shardfold.simulate.schedule import Operator, Schedule, Turn
from shardfold.simulate.timeline import Exposed, Sample, Simulation, Span, Timeline

FIRST: tuple[Turn, ...] = ("every",)
BETWEEN: tuple[Turn, ...] = ("every", "later")
LAST: tuple[Turn, ...] = ("every", "later", "last")


def parted(schedule: Schedule) -> list[tuple[Schedule, int]]:
    """The schedules of the kinds of pass, in order, and how often each is done."""
    if schedule.passes == 1:
        return [(schedule, 1)]
    kinds = ((FIRST, 1), (BETWEEN, schedule.passes - 2), (LAST, 1))
    return [(_of(schedule, turns), count) for turns, count in kinds if count]


def _of(schedule: Schedule, turns: tuple[Turn, ...]) -> Schedule:
    """The tasks of those turns; the update, too, if the last is among them."""
    segments = tuple(
        msgspec.structs.replace(s, operators=tuple(_operator(op, turns) for op in s.operators))
        for s in schedule.segments
    )
    return msgspec.structs.replace(schedule, segments=segments, passes=1)


def _operator(op: Operator, turns: tuple[Turn, ...]) -> Operator:
    backward = tuple(task for task in op.backward if task.turn in turns)
    update = op.update if "last" in turns else ()
    if len(backward) == len(op.backward) and update is op.update:
        return op
    return msgspec.structs.replace(op, backward=backward, update=update)


def combined(found: Sequence[tuple[Simulation, int]]) -> Simulation:
    """The figures of all passes; the peak is that of the pass that needs most."""
    step = sum(one.step_seconds * n for one, n in found)
    peak = max((one for one, _ in found), key=lambda one: one.peak_bytes)
    totals: dict[tuple[str, str, str], tuple[int, float, float]] = {}
    for one, n in found:
        for each in one.collectives:
            key = (each.stream, each.phase, each.kind)
            count, seconds, exposed = totals.get(key, (0, 0.0, 0.0))
            totals[key] = (
                count + n * each.count,
                seconds + n * each.seconds,
                exposed + n * each.exposed_seconds,
            )

    def mean(share: Callable[[Simulation], float]) -> float:
        return sum(share(one) * one.step_seconds * n for one, n in found) / step if step else 0.0

    return msgspec.structs.replace(
        peak,
        step_seconds=step,
        compute_seconds=sum(one.compute_seconds * n for one, n in found),
        communication_seconds=sum(one.communication_seconds * n for one, n in found),
        exposed_seconds=sum(one.exposed_seconds * n for one, n in found),
        mfu=mean(lambda one: one.mfu),
        utilisation={stream: mean(partial(_busy, stream)) for stream in peak.utilisation},
        collectives=tuple(Exposed(*key, *total) for key, total in totals.items()),
    )


def _busy(stream: str, one: Simulation) -> float:
    return one.utilisation[stream]


def in_a_row(found: Sequence[tuple[Timeline, float, int]]) -> Timeline:
    """The timelines of passes, each with its seconds and how often it is done, as one."""
    spans: list[Span] = []
    memory: list[Sample] = []
    now = 0.0
    for line, seconds, count in found:
        for _ in range(count):
            spans += [_later(span, now) for span in line.spans]
            memory += [Sample(now + sample.seconds, sample.bytes) for sample in line.memory]
            now += seconds
    return Timeline(found[0][0].streams, tuple(spans), tuple(memory))


def _later(span: Span, seconds: float) -> Span:
    start, end = span.start_seconds + seconds, span.end_seconds + seconds
    return msgspec.structs.replace(span, start_seconds=start, end_seconds=end)
