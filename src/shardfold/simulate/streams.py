"""The streams of a device, and the record of what ran on them.

A device has a stream for local work, and one for the links of each level. The host asks for work
ahead of the device; where it is the slower one, the device waits for it. A collective runs on the
streams of all levels that it crosses. One that work waits for goes before those that wait in a
queue, and a gather before a reduction; what runs is not interrupted. Queues are served when the
clock of local work moves on, so that each task is looked at once.

The record has totals per collective, memory events, and spans where wanted.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from shardfold.simulate.schedule import COMPUTE, Exposed, Sample, Span, Task


class Place(NamedTuple):
    """Where a task belongs."""

    operator: str
    segment: str
    block: str
    phase: str


@dataclass(slots=True)
class Pending:
    """A collective that local work does not wait for yet; `end` is nan until it has run."""

    task: Task
    place: Place
    ready: float
    key: tuple[int, int]  # operator and task within a block: the same in every equal block
    end: float = math.nan

    @property
    def has_run(self) -> bool:
        """Whether its end is known."""
        return not math.isnan(self.end)


class Ran(NamedTuple):
    """A task with its times, as it goes to the record."""

    task: Task
    place: Place
    start: float
    end: float


class Streams:
    """The clocks of all streams, and the queues of collectives that may run by themselves."""

    def __init__(self, levels: int) -> None:
        self.clock = 0.0
        self.asked = 0.0  # until when the host has asked for work
        self.free = [0.0] * levels
        self.queues: dict[tuple[str, int], deque[Pending]] = {}
        self.finished: list[Ran] = []  # run since they were last collected

    def enqueue(self, pending: Pending) -> None:
        """Let a collective run as soon as its streams are free."""
        queue = (pending.task.mode, min(pending.task.levels))
        self.queues.setdefault(queue, deque()).append(pending)

    def work(self, task: Task) -> float:
        """Local work, as soon as it is asked for; when it started."""
        self.asked += task.host_seconds
        start = max(self.clock, self.asked) if task.host_seconds else self.clock
        self.clock = start + task.seconds
        return start

    def start(self, task: Task) -> tuple[float, float]:
        """A collective that goes before those in a queue: when it starts, and when it ends."""
        self.serve(self.clock)
        start = max([self.clock, *(self.free[level] for level in task.levels)])
        end = start + task.seconds
        for level in task.levels:
            self.free[level] = end
        return start, end

    def until(self, pending: Pending) -> float:
        """Wait for a queued collective: how long work stood still."""
        self.serve(self.clock)
        while not pending.has_run:
            self._run_next(math.inf)
        return self.until_time(pending.end)

    def until_time(self, end: float) -> float:
        """Wait for a moment: how long work stood still."""
        waited = max(0.0, end - self.clock)
        self.clock += waited
        return waited

    def serve(self, until: float) -> None:
        """Run what can start before a moment."""
        while self._run_next(until):
            pass

    def _run_next(self, until: float) -> bool:
        """Run the queued collective that can start first, gathers before reductions."""
        free, best, first = self.free, math.inf, None
        for key, queue in self.queues.items():
            if queue:
                head = queue[0]
                start = head.ready
                for at in head.task.levels:
                    if free[at] > start:
                        start = free[at]
                if first is None or start < best or (start == best and key < first):
                    best, first = start, key
        if first is None or best >= until:
            return False
        start, pending = best, self.queues[first].popleft()
        pending.end = start + pending.task.seconds
        for at in pending.task.levels:
            self.free[at] = pending.end
        self.finished.append(Ran(pending.task, pending.place, start, pending.end))
        return True

    def shift(self, seconds: float, asked_seconds: float) -> None:
        """Move every clock, as if the same had gone on for so long; the host's at its own pace."""
        self.clock += seconds
        self.asked += asked_seconds
        self.free = [at + seconds for at in self.free]
        for queue in self.queues.values():
            for pending in queue:
                pending.ready += seconds


Total = list[float]  # count, seconds, exposed seconds
Key = tuple[str, str, str]  # stream, phase and kind of a collective
Held = dict[tuple[str, str], float]  # bytes by segment and class
Sums = tuple[dict[Key, Total], dict[str, float], Held]


@dataclass(slots=True)
class Event:
    """Bytes that come (or go, negative) at a moment."""

    seconds: float
    place: Place
    bytes: dict[str, float]
    sign: float


@dataclass(slots=True)
class _Run:
    """A collective that ran from start to end on some levels."""

    key: Key
    levels: tuple[int, ...]
    start: float
    end: float
    span: int | None  # its number, where spans are kept


@dataclass(slots=True)
class Record:
    """The notes of one simulated step."""

    levels: tuple[str, ...]
    detailed: bool = False
    totals: dict[Key, Total] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0, 0.0]))
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    net: Held = field(default_factory=lambda: defaultdict(float))
    events: list[Event] = field(default_factory=list)
    spans: dict[int, Span] = field(default_factory=dict)
    recent: list[_Run] = field(default_factory=list)  # may still be waited for

    def ran(self, task: Task, place: Place, start: float, end: float) -> None:
        """Note a task that ran, the memory that it took and gave."""
        self.took(start, place, task.takes)
        self.gave(end, place, task.gives)
        streams = [self.levels[level] for level in task.levels] or [COMPUTE]
        for stream in streams:
            self.busy[stream] += task.seconds
        has_span = self.detailed and end > start
        if task.mode != "work":
            key = (streams[0], place.phase, task.kind)
            self.totals[key][0] += 1
            self.totals[key][1] += task.seconds
            number = len(self.spans) if has_span else None
            self.recent.append(_Run(key, task.levels, start, end, number))
        if has_span:
            self.spans[len(self.spans)] = Span(
                streams[0],
                place.operator,
                place.block,
                task.kind,
                place.phase,
                start,
                end,
                bytes=task.bytes,
            )

    def waited(self, task: Task, place: Place, end: float, seconds: float) -> None:
        """Note that work stood still until `end` for a collective that was noted before.

        What ran before it on its links, and held it up, is waited for as well: each collective
        is exposed for the part of the time in which it ran.
        """
        begin, now = end - seconds, end
        self.recent = [run for run in self.recent if run.end > begin]
        if seconds <= 0:
            return
        on = [run for run in self.recent if not set(task.levels).isdisjoint(run.levels)]
        for run in sorted(on, key=lambda run: -run.end):
            part = min(now, run.end) - max(begin, run.start)
            if part > 0:
                self._expose(run.key, run.span, part)
                now = max(begin, run.start)
        if now > begin:  # of what is told no more: the collective itself stands for it
            self._expose((self.levels[task.levels[0]], place.phase, task.kind), None, now - begin)

    def _expose(self, key: Key, span: int | None, seconds: float) -> None:
        self.totals[key][2] += seconds
        if span is not None:
            self.spans[span] = _exposed(self.spans[span], seconds)

    def took(self, seconds: float, place: Place, sizes: dict[str, float]) -> None:
        """Note memory that is taken."""
        if sizes:
            self._event(seconds, place, sizes, 1.0)

    def gave(self, seconds: float, place: Place, sizes: dict[str, float]) -> None:
        """Note memory that is given back."""
        if sizes:
            self._event(seconds, place, sizes, -1.0)

    def _event(self, seconds: float, place: Place, sizes: dict[str, float], sign: float) -> None:
        self.events.append(Event(seconds, place, sizes, sign))
        for kind, size in sizes.items():
            self.net[place.segment, kind] += sign * size

    def snapshot(self) -> Sums:
        """The sums so far."""
        return {k: list(v) for k, v in self.totals.items()}, dict(self.busy), dict(self.net)

    def repeat(self, before: Sums, times: int, now: float, shift: float, place: Place) -> None:
        """Count what came since `before` `times` more, within the `shift` seconds from `now`."""
        totals, busy, net = before
        for key, total in self.totals.items():
            old = totals.get(key, [0.0, 0.0, 0.0])
            self.totals[key] = [t + times * (t - o) for t, o in zip(total, old, strict=True)]
        for stream in self.busy:
            self.busy[stream] += times * (self.busy[stream] - busy.get(stream, 0.0))
        for event in self.events:
            if event.seconds > now:
                event.seconds += shift
        for run in self.recent:
            run.start, run.end = run.start + shift, run.end + shift
        grown: dict[str, dict[str, float]] = defaultdict(dict)
        for (segment, kind), size in list(self.net.items()):
            more = times * (size - net.get((segment, kind), 0.0))
            if more:
                grown[segment][kind] = more
        for segment, sizes in grown.items():
            at = Place(place.operator, segment, place.block, place.phase)
            self._event(now, at, sizes, 1.0)

    def collectives(self) -> tuple[Exposed, ...]:
        """The totals of every kind of collective."""
        return tuple(
            Exposed(stream, phase, kind, round(count), seconds, exposed)
            for (stream, phase, kind), (count, seconds, exposed) in self.totals.items()
        )

    def memory(self, resident: dict[str, float]) -> tuple[list[Sample], Peak]:
        """The memory over time (only where detailed), and its peak."""
        self.events.sort(key=lambda event: event.seconds)
        held: Held = defaultdict(float)
        now = dict(resident)
        most, fullest = self._fullest(sum(resident.values()))
        samples = [Sample(0.0, dict(now))] if self.detailed else []
        peak = Peak(most, dict(now), {}, Place("", "", "", "between steps"))
        for number, event in enumerate(self.events if self.detailed else self.events[:fullest]):
            for kind, size in event.bytes.items():
                now[kind] = now.get(kind, 0.0) + event.sign * size
                held[event.place.segment, kind] += event.sign * size
            if number == fullest - 1:
                peak = Peak(most, dict(now), dict(held), event.place)
            if self.detailed:
                if samples[-1].seconds == event.seconds:
                    samples.pop()
                samples.append(Sample(event.seconds, dict(now)))
        return samples, peak

    def _fullest(self, resident: float) -> tuple[float, int]:
        """The most memory, and after how many events it is reached."""
        total = most = resident
        fullest = 0
        for number, event in enumerate(self.events, 1):
            for size in event.bytes.values():
                total += event.sign * size
            if total > most * (1 + 1e-12):
                most, fullest = total, number
        return most, fullest


@dataclass(frozen=True, slots=True)
class Peak:
    """The most memory of a step: by class, by segment, and where it is reached."""

    bytes: float
    by_class: dict[str, float]
    held: Held
    place: Place

    def by_segment(self) -> dict[str, float]:
        """Bytes that the operators of each segment took and have not given back."""
        found: dict[str, float] = defaultdict(float)
        for (segment, _), size in self.held.items():
            found[segment] += size
        return {name: size for name, size in found.items() if size > 0}


def _exposed(span: Span, seconds: float) -> Span:
    return msgspec.structs.replace(span, exposed_seconds=span.exposed_seconds + seconds)
