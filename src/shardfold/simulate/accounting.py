"""What a simulation notes down: totals per collective, memory events, spans where wanted."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import msgspec

from shardfold.simulate.schedule import COMPUTE, Task
from shardfold.simulate.streams import Place
from shardfold.simulate.timeline import Exposed, Sample, Span

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
        if task.takes:
            self._event(start, place, task.takes, 1.0)
        if task.gives:
            self._event(end, place, task.gives, -1.0)
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
        total = sum(resident.values())
        samples = [Sample(0.0, dict(now))] if self.detailed else []
        peak = Peak(total, dict(now), {}, Place("", "", "", "between steps"))
        for event in self.events:
            for kind, size in event.bytes.items():
                now[kind] = now.get(kind, 0.0) + event.sign * size
                held[event.place.segment, kind] += event.sign * size
                total += event.sign * size
            if total > peak.bytes * (1 + 1e-12):
                peak = Peak(total, dict(now), dict(held), event.place)
            if self.detailed:
                if samples[-1].seconds == event.seconds:
                    samples.pop()
                samples.append(Sample(event.seconds, dict(now)))
        return samples, peak


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
