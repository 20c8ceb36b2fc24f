"""The schedule of a step on one device, the timeline that it comes to, and micro-batches.

A schedule has tasks in order, with repeated blocks stored once. It is plain and complete: the
simulator needs nothing else, and a plan file holds it. Its size does not grow with the number of
devices (all of one kind do the same) nor with the number of equal blocks (a segment has a count).

With gradient accumulation, a step runs k micro-batches, each 1/k of the batch, and one update.
Three kinds differ: the first finds no gradients to add to; those between add theirs; the last also
runs the delayed all-reduces, and updates. Each kind is simulated once:

    step = first + (k - 2) * between + last

Micro-batches do not overlap: forward waits for the reductions of the backward before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Literal

import msgspec

# How a task relates to the device's own work:
#   work     local computation, one after the other;
#   wait     a collective whose result the next task needs, so that work stands still;
#   beside   one that runs beside the next piece of work, and is waited for after it;
#   ahead    a gather of parameters, which may run before it is needed;
#   behind   a reduction of gradients, which only the update waits for.
Mode = Literal["work", "wait", "beside", "ahead", "behind"]
# In which passes of a step a task is done: in every one, in all but the first, in the last only.
Turn = Literal["every", "later", "last"]
CLASSES = ("parameters", "gradients", "optimizer", "activations", "buffers")
"""Of memory. Activations: what is kept for backward, or still to be read. Buffers: all that lives
shortly: gathered parameters, tensors on their way between layouts, gradients of activations."""
COMPUTE = "compute"
"""The name of the stream of local work; the others bear the names of link levels."""


# Bounds of what a file may say: a stranger's figures end in an error, not in endless work.
Quantity = Annotated[float, msgspec.Meta(ge=0)]
Whole = Annotated[int, msgspec.Meta(ge=0)]
Number = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of plain values: immutable, strict about what a file may contain."""


class Task(Value, frozen=True):
    """A piece of work or a collective; bytes by class are taken as it starts, given as it ends."""

    kind: str  # forward, backward, update, all_gather, ...
    seconds: Quantity
    mode: Mode = "work"
    levels: tuple[int, ...] = ()  # the levels of links that a collective crosses
    bytes: Quantity = 0.0  # of a collective's larger side
    takes: dict[str, float] = msgspec.field(default_factory=dict)
    gives: dict[str, float] = msgspec.field(default_factory=dict)
    turn: Turn = "every"
    host_seconds: Quantity = 0.0  # of work: what the host takes to ask for it, ahead of the device


class Again(Value, frozen=True):
    """An operator that is run once more before backward, because its results were dropped."""

    name: str
    tasks: tuple[Task, ...]


class Operator(Value, frozen=True):
    """One operator's tasks in each phase; `flops` are useful ones, of forward and backward.

    `again` is what has to be recomputed before this operator's backward, in order: all that no
    backward before needed.
    """

    name: str
    forward: tuple[Task, ...] = ()
    backward: tuple[Task, ...] = ()
    update: tuple[Task, ...] = ()
    again: tuple[Again, ...] = ()
    flops: float = 0.0


class Segment(Value, frozen=True):
    """Operators that follow one another, `count` times: equal blocks are one segment."""

    name: str
    operators: tuple[Operator, ...]
    count: Number = 1
    names: tuple[str, ...] = ()  # of each of the `count` blocks, where they have some


class Schedule(Value, frozen=True):
    """A whole step: segments forward, then backward in reverse, then the update.

    With several `passes`, forward and backward are done so often, each time on a part of the batch,
    before the one update.
    """

    levels: tuple[str, ...]  # outermost first
    segments: tuple[Segment, ...]
    resident: dict[str, float]  # bytes by class that are there all the time
    peak_flops: float  # of a device, in the dtype of most products
    ahead: Whole = 8  # operators whose parameters may be gathered before their turn
    behind: Whole = 16  # operators whose gradients may wait to be reduced
    passes: Number = 1
    updating: float = 0.0  # bytes that are there from the update's first kernel to its last

    @property
    def flops(self) -> float:
        """The useful ones of a pass, on one device."""
        return sum(op.flops * s.count for s in self.segments for op in s.operators)


class Span(Value, frozen=True):
    """A task on a stream, from start to end; `exposed_seconds` is how long work waited for it."""

    stream: str
    operator: str
    block: str
    kind: str
    phase: str  # forward, backward or update
    start_seconds: float
    end_seconds: float
    exposed_seconds: float = 0.0
    bytes: float = 0.0


class Sample(Value, frozen=True):
    """The memory of a device from a moment on, by class."""

    seconds: float
    bytes: dict[str, float]

    @property
    def total(self) -> float:
        """Of all classes."""
        return sum(self.bytes.values())


class Timeline(Value, frozen=True):
    """Every span of a step in order of start, and its memory whenever that changes."""

    streams: tuple[str, ...]
    spans: tuple[Span, ...]
    memory: tuple[Sample, ...]


class Exposed(Value, frozen=True):
    """Collectives of one kind, phase and stream: how long they ran, how long work waited."""

    stream: str
    phase: str
    kind: str
    count: int
    seconds: float
    exposed_seconds: float


class Simulation(Value, frozen=True):
    """The figures of a step. `mfu`: useful FLOP over what the device could do in the time."""

    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    peak_bytes: float
    peak_by_class: dict[str, float]
    peak_at: str  # the operator and phase of the peak
    mfu: float
    utilisation: dict[str, float]  # per stream, the share of the step in which it is busy
    collectives: tuple[Exposed, ...] = ()
    peak_by_block: dict[str, float] = msgspec.field(
        default_factory=dict
    )  # what each segment holds at the peak


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
    updating = schedule.updating if "last" in turns else 0.0
    return msgspec.structs.replace(schedule, segments=segments, passes=1, updating=updating)


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
