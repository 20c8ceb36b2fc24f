"""Simulates all stages of a pipeline: fill, steady state, drain.

A device does its actions in order, each as soon as the device is free and what it reads has
arrived. A forward reads what the stage before sent, a backward what the stage after sent; between
two devices messages go one after the other in each direction, beside the work. So every time is a
maximum of two earlier ones, plus a constant.

Equal rounds are counted, not walked through. If from one round to the next each time has grown by
as much as in the round before, it goes on growing so for as long as every maximum is taken from
the same side. A maximum changes sides when its slack is used up, which shrinks by the same amount
in every round. So the walk may go on to the round before the first change, and there all is
exactly as if it had been walked. A schedule of 1,000 micro-batches costs about what one of a few
dozen costs.

After its last backward a stage has its reductions to wait for, then the update.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardfold.pipeline.schedules import Action, Piece, Pipeline

SAME = 1e-9  # of a round's time: grown by as much
LONGEST = 2**53


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one stage, of a micro-batch where nothing else is said.

    `weight` is the part of `backward` for the weights' gradients. `first` and `last` are what the
    first and the last micro-batch's backward take more (or less); `reduce` is what the reductions
    of gradients take after that, `update` what follows them.
    """

    forward: float
    backward: float
    weight: float = 0.0
    send_forward: float = 0.0  # to the next stage
    send_backward: float = 0.0  # to the stage before
    first: float = 0.0
    last: float = 0.0
    reduce: float = 0.0
    update: float = 0.0


@dataclass(frozen=True, slots=True)
class PipelineSimulation:
    """A step of a pipeline.

    `bubble` is the share of all devices' time in which they have nothing to do.
    """

    step_seconds: float
    bubble: float
    busy_seconds: tuple[float, ...]  # of each device
    in_flight: tuple[int, ...]  # of each stage: the most micro-batches between forward and backward


def simulate(
    pipeline: Pipeline,
    stages: Sequence[StageTimes],
    tied: Sequence[tuple[Sequence[int], float]] = (),
) -> PipelineSimulation:
    """The step; `tied` are devices that sum the gradient of a shared parameter, and its seconds.

    That begins when all of them have their own gradients, and their updates wait for it.
    """
    walk = _Walk(pipeline, stages)
    walk.run()
    ends = [_reduced(stages, walk, pipeline.stages_on(d)) for d in range(pipeline.devices)]
    for devices, seconds in tied:
        summed = max(ends[device] for device in devices) + seconds
        for device in devices:
            ends[device] = summed
    busy = []
    for device in range(pipeline.devices):
        own = [stages[s] for s in pipeline.stages_on(device)]
        update = sum(each.update for each in own)
        ends[device] += update
        work = sum(_work(each, pipeline.micro_batches) for each in own)
        busy.append(work + update + sum(each.reduce for each in own))
    step = max(ends)
    share = 1 - sum(busy) / (step * pipeline.devices) if step else 0.0
    return PipelineSimulation(step, max(0.0, share), tuple(busy), in_flight(pipeline))


@dataclass(frozen=True, slots=True)
class Turn:
    """What a device does from one moment to another."""

    device: int
    what: str  # `2F0`, or what ends a step
    phase: str
    start: float
    end: float


def timeline(
    pipeline: Pipeline,
    stages: Sequence[StageTimes],
    tied: Sequence[tuple[Sequence[int], float]] = (),
) -> list[Turn]:
    """Every action of every device, in the order of time; gaps between them are the bubble."""
    walk, found = _Walk(pipeline, stages), list[Turn]()
    walk.turns = found
    for pieces in zip(*pipeline.orders, strict=True):
        order = walk._in_order(pieces)
        for time in range(pieces[0].times):
            walk._round(order, time * pieces[0].step)

    def add(device: int, what: str, start: float, end: float) -> None:
        if end > start:
            phase = "update" if what == "update" else "backward"
            found.append(Turn(device, what, phase, start, end))

    ends = list(walk.clock)
    for device, begin in enumerate(walk.clock):
        ends[device] = _reduced(stages, walk, pipeline.stages_on(device))
        add(device, "reduce", begin, ends[device])
    for devices, seconds in tied:
        begin = max(ends[device] for device in devices)
        for device in devices:
            ends[device] = begin + seconds
            add(device, "sum of tied gradients", begin, ends[device])
    for device, begin in enumerate(ends):
        updates = sum(stages[s].update for s in pipeline.stages_on(device))
        add(device, "update", begin, begin + updates)
    return sorted(found, key=lambda turn: turn.start)


def _work(stage: StageTimes, micro_batches: int) -> float:
    each = stage.forward + stage.backward
    return each * micro_batches + stage.first + (stage.last if micro_batches > 1 else 0.0)


def _reduced(stages: Sequence[StageTimes], walk: _Walk, own: Sequence[int]) -> float:
    """When a device has all its gradients: a chunk's reductions go on beside later work."""
    return max(walk.last_end[s] + stages[s].reduce for s in own)


Message = tuple[int, str]  # the stage that sends, and of which side: F or B
Place = int | tuple[tuple[int, int] | None, Message, int]  # a device's clock, or a message


@dataclass(slots=True)
class _Noted:
    """What was found in one round: every time with its place, and the slack of every maximum."""

    places: list[Place] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    slacks: list[float] = field(default_factory=list)

    def note(self, place: Place, time: float) -> None:
        self.places.append(place)
        self.times.append(time)


class _Walk:
    def __init__(self, pipeline: Pipeline, stages: Sequence[StageTimes]) -> None:
        self.pipeline, self.stages = pipeline, stages
        self.device_of = [pipeline.device_of(s) for s in range(pipeline.stages)]
        self.clock = [0.0] * pipeline.devices
        self.links: dict[tuple[int, int], float] = {}  # sender and receiver: free from then on
        self.there: dict[Message, dict[int, float]] = {}  # when it arrives, by micro-batch
        self.last_end = [0.0] * len(stages)
        self.turns: list[Turn] | None = None  # what was done, for who asks

    def run(self) -> None:
        for pieces in zip(*self.pipeline.orders, strict=True):
            self._piece(pieces)

    # Rounds

    def _piece(self, pieces: Sequence[Piece]) -> None:
        """All times of a piece, on every device."""
        order, lag = self._in_order(pieces), self._lag(pieces)
        times, step = pieces[0].times, pieces[0].step
        before: _Noted | None = None
        alike: list[float] = []  # by how much every time has grown, and
        count = 0  # in how many rounds in a row
        done = 0
        while done < times:
            noted = self._round(order, done * step)
            done += 1
            if before is not None:
                grown = [b - a for a, b in zip(before.times, noted.times, strict=True)]
                near = SAME * max(map(abs, grown), default=0.0)
                is_alike = count and all(
                    abs(a - b) <= near for a, b in zip(alike, grown, strict=True)
                )
                alike, count = grown, count + 1 if is_alike else 1
                if count > lag + 1:
                    rounds = min(times - done - 1, _until_change(before, noted, near))
                    if rounds > 0:
                        self._jump(noted, grown, rounds, step, lag)
                        done, count, before = done + rounds, 0, None
                        continue
            before = noted

    def _in_order(self, pieces: Sequence[Piece]) -> list[tuple[int, Action]]:
        """One round's actions, each after what it reads."""
        unmade = {message for p in pieces for a in p.actions if (message := _makes(a)) is not None}
        found: list[tuple[int, Action]] = []
        left = [deque(piece.actions) for piece in pieces]
        while any(left):
            before = len(found)
            for device, own in enumerate(left):
                while own and (self._reads(own[0]), own[0].micro_batch) not in unmade:
                    unmade.discard(_makes(own[0]))
                    found.append((device, own.popleft()))
            if len(found) == before:
                raise AssertionError(f"{self.pipeline.schedule}: devices wait for one another.")
        return found

    def _lag(self, pieces: Sequence[Piece]) -> float:
        """How many rounds lie between a message and its reader, at most."""
        made: dict[Message, int] = {}  # the first micro-batch of each
        for piece in pieces:
            for action in piece.actions:
                message = _makes(action)
                if message is not None:
                    made.setdefault(message[0], message[1])
        lag = 0.0
        for piece in pieces:
            for action in piece.actions:
                source = self._reads(action)
                if source is not None:
                    if source not in made or not piece.step:
                        return math.inf
                    lag = max(lag, -((action.micro_batch - made[source]) // piece.step))
        return lag

    def _jump(
        self, noted: _Noted, grown: Sequence[float], rounds: int, step: int, lag: float
    ) -> None:
        """Every clock, link and message as it stands so many rounds later."""
        for place, time, more in zip(noted.places, noted.times, grown, strict=True):
            later = time + rounds * more
            if isinstance(place, int):
                self.clock[place] = later
                continue
            link, message, number = place
            if link is not None:
                self.links[link] = later
            arrivals = self.there[message]
            for back in range(int(lag) + 1):
                if number - back * step in arrivals:
                    arrivals[number + (rounds - back) * step] = later - back * more

    # Actions

    def _round(self, order: Sequence[tuple[int, Action]], later: int) -> _Noted:
        noted = _Noted()
        for device, (stage, kind, number) in order:
            self._act(device, Action(stage, kind, number + later), noted)
        return noted

    def _act(self, device: int, action: Action, noted: _Noted) -> None:
        start, source = self.clock[device], self._reads(action)
        if source is not None:
            arrived = self.there[source][action.micro_batch]
            noted.slacks.append(start - arrived)
            start = max(start, arrived)
        end = self.clock[device] = start + self._seconds(action)
        if self.turns is not None:
            phase = "forward" if action.kind == "F" else "backward"
            self.turns.append(Turn(device, str(action), phase, start, end))
        noted.note(device, end)
        if action.kind != "F":
            self.last_end[action.stage] = end
        message = _makes(action)
        if message is not None:
            self._send(device, *message, end, noted)

    def _send(self, device: int, message: Message, number: int, end: float, noted: _Noted) -> None:
        stage, side = message
        target = stage + (1 if side == "F" else -1)
        if not 0 <= target < len(self.stages):
            return
        link = (device, self.device_of[target])
        between = None
        if link[0] != link[1]:
            between, times = link, self.stages[stage]
            free = self.links.get(link, 0.0)
            noted.slacks.append(end - free)
            end = max(end, free) + (times.send_forward if side == "F" else times.send_backward)
            self.links[link] = end
        self.there.setdefault(message, {})[number] = end
        noted.note((between, message, number), end)

    def _reads(self, action: Action) -> Message | None:
        """The message that an action waits for, if it waits for any."""
        if action.kind == "F":
            return (action.stage - 1, "F") if action.stage else None
        if action.kind == "W" or action.stage == len(self.stages) - 1:
            return None
        return action.stage + 1, "B"

    def _seconds(self, action: Action) -> float:
        stage = self.stages[action.stage]
        if action.kind == "F":
            return stage.forward
        if action.kind == "I":
            return stage.backward - stage.weight
        seconds = stage.backward if action.kind == "B" else stage.weight
        if action.micro_batch == 0:
            return seconds + stage.first
        is_last = action.micro_batch == self.pipeline.micro_batches - 1
        return seconds + stage.last if is_last else seconds


def _makes(action: Action) -> tuple[Message, int] | None:
    """What an action sends on, and of which micro-batch."""
    if action.kind == "W":
        return None
    return (action.stage, "F" if action.kind == "F" else "B"), action.micro_batch


def _until_change(before: _Noted, noted: _Noted, near: float) -> int:
    """For how many rounds every maximum is taken from the same side as now."""
    rounds = math.inf
    for last, slack in zip(before.slacks, noted.slacks, strict=True):
        drift = slack - last
        if abs(drift) > near and (slack < 0) == (drift > 0):
            rounds = min(rounds, abs(slack) // abs(drift))
    return int(min(rounds, LONGEST))


def held(pipeline: Pipeline, device: int) -> Iterator[tuple[int, Mapping[int, int]]]:
    """The stage of every action that may find the most in flight, and what is in flight then.

    That is by stage, micro-batches whose forward is done or under way and whose backward, W
    included, is not done; the counts are good until the next are asked for. Of a piece, the first
    and the last time are enough: between them counts grow or shrink evenly.
    """
    count = dict.fromkeys(pipeline.stages_on(device), 0)
    for piece in pipeline.orders[device]:
        before = dict(count)
        for time in range(min(piece.times, 2)):
            if time:  # the last
                net = {stage: count[stage] - before[stage] for stage in count}
                count = {s: before[s] + net[s] * (piece.times - 1) for s in count}
            for stage, kind, _ in piece.actions:
                count[stage] += kind == "F"
                yield stage, count
                count[stage] -= kind in "BW"


def in_flight(pipeline: Pipeline) -> tuple[int, ...]:
    """Of each stage the most micro-batches whose forward is done and whose backward is not."""
    most = [0] * pipeline.stages
    for device in range(pipeline.devices):
        for stage, count in held(pipeline, device):
            most[stage] = max(most[stage], count[stage])
    return tuple(most)
