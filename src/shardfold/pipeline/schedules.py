"""Schedules as data: what each device of a pipeline does, action by action.

Actions have the names of torch.distributed.pipelining: `2F0` is the forward of stage 2 on
micro-batch 0, B its backward; where a schedule splits backward, I is the gradient of the stage's
input, W that of its weights.

    gpipe        all forwards, then all backwards
    1f1b         a backward as soon as there is one: stage i holds min(m, S - i) micro-batches
    interleaved  1F1B with v chunks of the model on every device: a bubble of 1/v
    zbv          zero bubble, V-shaped: the first and the last stage on one device, W in the bubble

Micro-batches are equal, so a device's actions are a few pieces, the longest of which is done again
and again with later micro-batches. All devices have the same pieces, equally often, and none waits
within one time for what another does in a later one: so a walk may take them time by time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from shardfold.errors import InputError

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One stage's forward or backward on one micro-batch.

    >>> str(Action(2, "F", 0))
    '2F0'
    """

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Piece:
    """Actions that are done `times` times, each time `step` micro-batches later."""

    actions: tuple[Action, ...]
    times: int = 1
    step: int = 0

    def at(self, time: int) -> Iterator[Action]:
        """The actions of one time."""
        later = time * self.step
        return (Action(stage, kind, number + later) for stage, kind, number in self.actions)


Order = tuple[Piece, ...]  # of one device


@dataclass(frozen=True)
class Pipeline:
    """`devices` in a row (each of them a whole mesh), `chunks` of the model on each."""

    schedule: str
    devices: int
    micro_batches: int
    chunks: int = 1

    def __post_init__(self) -> None:
        SCHEDULES[self.schedule].check(self)

    @property
    def stages(self) -> int:
        """The parts of the model, in the order of forward."""
        return self.devices * self.chunks

    def device_of(self, stage: int) -> int:
        """Where a stage runs: round and round, or there and back."""
        chunk, place = divmod(stage, self.devices)
        turns = SCHEDULES[self.schedule].turns and chunk % 2 == 1
        return self.devices - 1 - place if turns else place

    def stages_on(self, device: int) -> list[int]:
        """The stages of a device, the first part of the model first."""
        return [stage for stage in range(self.stages) if self.device_of(stage) == device]

    @cached_property
    def orders(self) -> tuple[Order, ...]:
        """The actions of every device."""
        make = SCHEDULES[self.schedule].order
        return tuple(make(self, device) for device in range(self.devices))

    def actions(self, device: int) -> list[Action]:
        """All actions of a device, in order."""
        return [a for piece in self.orders[device] for k in range(piece.times) for a in piece.at(k)]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A kind of schedule: the order of one device, and what it asks for."""

    order: Callable[[Pipeline, int], Order]
    check: Callable[[Pipeline], None]
    turns: bool = False  # every other chunk goes back over the devices


@dataclass
class _Writer:
    """Writes actions in order; each stage takes its micro-batches one after the other."""

    counts: Counter[tuple[int, Kind]] = field(default_factory=Counter)
    pieces: list[Piece] = field(default_factory=list)
    open: list[Action] = field(default_factory=list)

    def add(self, stage: int, *kinds: Kind) -> None:
        for kind in kinds:
            self.open.append(Action(stage, kind, self.counts[stage, kind]))
            self.counts[stage, kind] += 1

    def close(self, times: int = 1, step: int = 0) -> None:
        """End a piece, that is done so often."""
        for action in self.open:
            self.counts[action.stage, action.kind] += (times - 1) * (step > 0)
        self.pieces.append(Piece(tuple(self.open), times, step))
        self.open = []


def _gpipe(pipeline: Pipeline, device: int) -> Order:
    """Backward in the order of forward, as torch does it."""
    times = pipeline.micro_batches
    forward = Piece((Action(device, "F", 0),), times, 1)
    return (forward, Piece((Action(device, "B", 0),), times, 1))


def _one_forward_one_backward(pipeline: Pipeline, device: int) -> Order:
    """As many forwards as stages follow, then one of each in turn.

    A round takes as many micro-batches as there are devices: a delay goes once around in it.
    """
    devices, count, writer = pipeline.devices, pipeline.micro_batches, _Writer()
    ahead = min(count, devices - device)
    for _ in range(ahead):
        writer.add(device, "F")
    writer.close()
    rounds = max(0, count - devices) // devices  # of the device that is furthest ahead
    if rounds:
        for _ in range(devices):
            writer.add(device, "B", "F")
        writer.close(rounds, devices)
    for _ in range(count - ahead - rounds * devices):
        writer.add(device, "B", "F")
    for _ in range(ahead):
        writer.add(device, "B")
    writer.close()
    return tuple(writer.pieces)


def _interleaved(pipeline: Pipeline, device: int) -> Order:
    """Chunk after chunk, for as many micro-batches as there are devices (`together`) at a time."""
    devices, chunks, count = pipeline.devices, pipeline.chunks, pipeline.micro_batches
    together, every = _together(pipeline), pipeline.chunks * pipeline.micro_batches
    ahead = min(every, (chunks - 1) * together + 2 * (devices - 1 - device))
    writer = _Writer()

    def stage(number: int, backward: bool) -> int:
        chunk = number // together % chunks
        return (chunks - 1 - chunk if backward else chunk) * devices + device

    def pairs(numbers: range) -> None:
        for number in numbers:
            writer.add(stage(ahead + number, False), "F")
            writer.add(stage(number, True), "B")

    for number in range(ahead):
        writer.add(stage(number, False), "F")
    furthest = (chunks - 1) * together + 2 * (devices - 1)
    length = chunks * together
    rounds = max(0, every - furthest - (devices - 1)) // length
    # A device begins its rounds one pair after the device before it: with that, no device waits
    # for a later round of another.
    before = device if rounds else 0
    pairs(range(before))
    writer.close()
    if rounds:
        pairs(range(before, before + length))
        writer.close(rounds, together)
    done = before + rounds * length
    pairs(range(done, every - ahead))
    for number in range(every - ahead, every):
        writer.add(stage(number, True), "B")
    writer.close()
    assert all(writer.counts[s, "B"] == count for s in pipeline.stages_on(device))
    return tuple(writer.pieces)


def _together(pipeline: Pipeline) -> int:
    """Micro-batches that a chunk takes before the next chunk does."""
    return pipeline.micro_batches // max(1, pipeline.micro_batches // pipeline.devices)


def _zero_bubble_v(pipeline: Pipeline, device: int) -> Order:
    """Forward through both chunks, then backward in two parts; W waits only in the end.

    With fewer micro-batches than the schedule needs, those that are not there are left out.
    """
    devices, count = pipeline.devices, pipeline.micro_batches
    needed = max(2 * devices - 1, count)
    first, second = device, 2 * devices - 1 - device
    writer = _Writer()
    for _ in range(2 * (devices - device) - 1):
        writer.add(first, "F")
    for _ in range(device):
        writer.add(second, "F")
        writer.add(first, "F")
    for _ in range(devices - device):
        writer.add(second, "F", "I", "W")
    writer.close()
    rounds = needed - (2 * devices - 1)
    if rounds:
        writer.add(first, "F", "I", "W")
        writer.add(second, "F", "I", "W")
        writer.close(rounds, 1)
    while writer.counts[second, "F"] < needed:
        if writer.counts[first, "F"] < needed:
            writer.add(first, "F")
        writer.add(first, "I", "W")
        writer.add(second, "F", "I", "W")
    for _ in range(device):
        writer.add(first, "I")
        writer.add(second, "I")
    for _ in range(devices - device):
        writer.add(first, "I", "W")
    for stage in (second, first):
        while writer.counts[stage, "W"] < needed:
            writer.add(stage, "W")
    writer.close()
    if count == needed:
        return tuple(writer.pieces)
    return tuple(
        Piece(tuple(a for a in piece.actions if a.micro_batch < count)) for piece in writer.pieces
    )


def _check_single(pipeline: Pipeline) -> None:
    if pipeline.chunks != 1:
        raise InputError(
            f"schedule={pipeline.schedule} has one chunk of the model on a device, not "
            f"virtual={pipeline.chunks}. Try schedule=interleaved, or leave virtual out."
        )


def _check_interleaved(pipeline: Pipeline) -> None:
    count, devices = pipeline.micro_batches, pipeline.devices
    if pipeline.chunks < 2:
        raise InputError("schedule=interleaved needs virtual=2 or more chunks on a device.")
    rounds = max(1, count // devices)
    if count % rounds:
        below, above = count - count % devices, count + -count % devices
        near = above if not below or above - count < count - below else below
        raise InputError(
            f"schedule=interleaved takes micro-batches in {rounds} equal rounds over pp={devices}, "
            f"and {count} do not divide into them. Try micro-batches={near}."
        )


def _check_v(pipeline: Pipeline) -> None:
    if pipeline.chunks != 2:
        raise InputError(
            "schedule=zbv has two chunks of the model on a device: leave virtual out, or state "
            "virtual=2."
        )


SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": Schedule(_gpipe, _check_single),
    "1f1b": Schedule(_one_forward_one_backward, _check_single),
    "interleaved": Schedule(_interleaved, _check_interleaved),
    "zbv": Schedule(_zero_bubble_v, _check_v, turns=True),
}
