"""The streams of a device: local work, and one for the links of each level.

A collective runs on the streams of all levels that it crosses. One that work waits for goes
before those that wait in a queue, and a gather before a reduction; what runs is not interrupted.
Queues are served when the clock of local work moves on, so that each task is looked at once.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from shardfold.simulate.schedule import Task


@dataclass(frozen=True, slots=True)
class Place:
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


@dataclass(frozen=True, slots=True)
class Ran:
    """A task with its times, as it goes to the record."""

    task: Task
    place: Place
    start: float
    end: float


class Streams:
    """The clocks of all streams, and the queues of collectives that may run by themselves."""

    def __init__(self, levels: int) -> None:
        self.clock = 0.0
        self.free = [0.0] * levels
        self.queues: dict[tuple[str, int], deque[Pending]] = {}
        self.finished: list[Ran] = []  # run since they were last collected

    def enqueue(self, pending: Pending) -> None:
        """Let a collective run as soon as its streams are free."""
        queue = (pending.task.mode, min(pending.task.levels))
        self.queues.setdefault(queue, deque()).append(pending)

    def work(self, task: Task) -> float:
        """Local work, now; when it started."""
        start = self.clock
        self.clock = start + task.seconds
        return start

    def wait(self, task: Task) -> tuple[float, float]:
        """A collective that the next task needs: when it started, and how long work stood still."""
        self.serve(self.clock)
        start = max([self.clock, *(self.free[level] for level in task.levels)])
        end = start + task.seconds
        for level in task.levels:
            self.free[level] = end
        waited, self.clock = end - self.clock, end
        return start, waited

    def until(self, pending: Pending) -> float:
        """Wait for a queued collective: how long work stood still."""
        self.serve(self.clock)
        while not pending.has_run:
            self._run_next(math.inf)
        waited = max(0.0, pending.end - self.clock)
        self.clock += waited
        return waited

    def serve(self, until: float) -> None:
        """Run what can start before a moment."""
        while self._run_next(until):
            pass

    def _run_next(self, until: float) -> bool:
        """Run the queued collective that can start first, gathers before reductions."""
        best: tuple[float, str, int] | None = None
        for (mode, level), queue in self.queues.items():
            if queue:
                head = queue[0]
                start = max([head.ready, *(self.free[at] for at in head.task.levels)])
                if best is None or (start, mode, level) < best:
                    best = (start, mode, level)
        if best is None or best[0] >= until:
            return False
        start, mode, level = best
        pending = self.queues[mode, level].popleft()
        pending.end = start + pending.task.seconds
        for at in pending.task.levels:
            self.free[at] = pending.end
        self.finished.append(Ran(pending.task, pending.place, start, pending.end))
        return True

    def shift(self, seconds: float) -> None:
        """Move every clock, as if the same had gone on for that long."""
        self.clock += seconds
        self.free = [at + seconds for at in self.free]
        for queue in self.queues.values():
            for pending in queue:
                pending.ready += seconds
