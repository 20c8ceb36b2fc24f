"""Schedules a step's tasks on the streams of one device: forward, backward, update.

Work goes in order. A gather of parameters is put into its queue as soon as fewer than `ahead`
operators before it have theirs waiting; a reduction of gradients when its gradient is there, and
work stands still while more than `behind` operators have theirs under way. The update waits for
all reductions.

Equal blocks come to a rhythm: if all streams stand, relative to the clock of work, as they stood
one block ago, every further block takes as long as this one. Then blocks are counted, not walked
through, so that a step of 1,000 layers costs about what one of ten costs, with the same result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from shardfold.simulate.schedule import (
    COMPUTE,
    Schedule,
    Segment,
    Simulation,
    Task,
    Timeline,
    combined,
    in_a_row,
    parted,
)
from shardfold.simulate.streams import Pending, Place, Record, Streams, Sums

SAME = 1e-9  # of a block's time: standing that close is standing alike


def simulate(schedule: Schedule) -> Simulation:
    """The figures of a step."""
    return whole_step(passes(schedule))


def whole_step(found: Sequence[Pass]) -> Simulation:
    """The figures of a step, from its passes."""
    if len(found) == found[0].count == 1:
        return found[0].simulation
    return combined([(each.simulation, each.count) for each in found])


def timeline(schedule: Schedule) -> tuple[Simulation, Timeline]:
    """The figures of a step, and every task of every block in time."""
    found = [_Simulator(each, detailed=True).run(n) for each, n in parted(schedule)]
    if schedule.passes == 1:
        return found[0][0].simulation, found[0][1]
    lines = [(line, one.simulation.step_seconds, one.count) for one, line in found]
    return whole_step([one for one, _ in found]), in_a_row(lines)


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward and backward of a stage, in phases, and how often a step has it.

    `reduce_seconds` is the wait for reductions after backward, `host_seconds` what the host takes
    to ask for all work. `kept` are the bytes by class that forward leaves for backward.
    """

    simulation: Simulation
    count: int
    forward_seconds: float
    backward_seconds: float
    reduce_seconds: float
    update_seconds: float
    host_seconds: float
    kept: dict[str, float]


def passes(schedule: Schedule) -> list[Pass]:
    """The kinds of pass of a step, in order, each in its phases."""
    return [_Simulator(each, detailed=False).run(n)[0] for each, n in parted(schedule)]


@dataclass(frozen=True, slots=True)
class _Turn:
    """One operator's tasks in one pass; `phase` is that of the record."""

    name: str
    phase: str
    tasks: tuple[Task, ...]
    gathers: bool


@dataclass(frozen=True, slots=True)
class _Block:
    """The turns of a segment in one pass, `count` times."""

    segment: Segment
    turns: tuple[_Turn, ...]
    backwards: bool

    @property
    def host_seconds(self) -> float:
        """What the host takes to ask for all of it."""
        return sum(task.host_seconds for turn in self.turns for task in turn.tasks)

    def name(self, number: int) -> str:
        """Of the number-th block in this pass."""
        names = self.segment.names
        if not names:
            return self.segment.name
        return names[-1 - number] if self.backwards else names[number]


@dataclass(slots=True)
class _Cursor:
    """The next operator whose parameters are to be gathered: block, repeat, turn."""

    block: int = 0
    repeat: int = 0
    turn: int = 0


@dataclass(frozen=True, slots=True)
class _State:
    """How everything stands as a block begins, relative to the clock and to the block."""

    shape: object
    times: list[float]
    clock: float
    asked: float
    sums: Sums

    def is_like(self, before: _State) -> bool:
        near = SAME * (self.clock - before.clock)
        return self.shape == before.shape and all(
            abs(a - b) <= near for a, b in zip(self.times, before.times, strict=True)
        )


@dataclass
class _Simulator:
    schedule: Schedule
    detailed: bool
    issued: deque[list[Pending]] = field(default_factory=deque)  # gathers, not yet needed
    under_way: deque[list[Pending]] = field(default_factory=deque)  # reductions

    def __post_init__(self) -> None:
        self.streams = Streams(len(self.schedule.levels))
        self.record = Record(self.schedule.levels, self.detailed)

    def run(self, count: int) -> tuple[Pass, Timeline]:
        """Forward, backward and update, with the clock read after each phase."""
        self._pass(_forward(self.schedule))
        kept: dict[str, float] = {}
        for (_, kind), size in self.record.net.items():
            kept[kind] = kept.get(kind, 0.0) + size
        forward = self.streams.clock
        self._pass(_backward(self.schedule))
        backward = self.streams.clock
        while self.under_way:
            self._reduced()
        reduced = self.streams.clock
        copies = {"optimizer": self.schedule.updating} if self.schedule.updating else {}
        place = Place("optimizer", "", "", "update")
        self.record.took(reduced, place, copies)
        self._pass(_update(self.schedule))
        self.record.gave(self.streams.clock, place, copies)
        found, line = self._results()
        spans = (forward, backward - forward, reduced - backward, found.step_seconds - reduced)
        return Pass(found, count, *spans, self.streams.asked, kept), line

    # One pass over all blocks

    def _pass(self, blocks: Sequence[_Block]) -> None:
        cursor = _Cursor()
        for number, block in enumerate(blocks):
            self._block(blocks, number, block, cursor)

    def _block(self, blocks: Sequence[_Block], number: int, block: _Block, cursor: _Cursor) -> None:
        repeat = 0
        before: _State | None = None
        while repeat < block.segment.count:
            if block.segment.count > 2 and not self.detailed:
                state = self._state(block, number, repeat, cursor)
                if before is not None and state.is_like(before):
                    repeat += self._skip(block, number, repeat, cursor, before)
                    before = None
                else:
                    before = state
            place = block.name(repeat)
            for at, turn in enumerate(block.turns):
                self._gather_ahead(blocks, number, repeat, cursor)
                self._turn(turn, at, Place(turn.name, block.segment.name, place, turn.phase))
            repeat += 1

    def _turn(self, turn: _Turn, at: int, place: Place) -> None:
        behind: list[Pending] = []
        gathered = self.issued.popleft() if turn.gathers else []
        for pending in gathered:
            waited = self.streams.until(pending)
            self._served()
            self.record.waited(pending.task, pending.place, pending.end, waited)
        beside: list[tuple[Task, float]] = []  # with their ends
        for number, task in enumerate(turn.tasks):
            if task.mode == "work":
                start = self.streams.work(task)
                self.record.ran(task, place, start, self.streams.clock)
                self._awaited(beside, place)
                beside = []
            elif task.mode in ("wait", "beside"):
                start, end = self.streams.start(task)
                self._served()
                self.record.ran(task, place, start, end)
                if task.mode == "beside":
                    beside.append((task, end))
                else:
                    self._awaited([(task, end)], place)
            elif task.mode == "behind":
                pending = Pending(task, place, self.streams.clock, (at, number))
                self.streams.enqueue(pending)
                behind.append(pending)
        if behind:
            self.under_way.append(behind)
            self._hold_back()

    def _awaited(self, sent: Sequence[tuple[Task, float]], place: Place) -> None:
        """Let work stand still until collectives that run have ended."""
        for task, end in sent:
            self.record.waited(task, place, end, self.streams.until_time(end))

    def _gather_ahead(
        self, blocks: Sequence[_Block], number: int, repeat: int, cursor: _Cursor
    ) -> None:
        """Put the gathers of the next operators that have some into their queue."""
        while cursor.block < len(blocks) and len(self.issued) <= self.schedule.ahead:
            block = blocks[cursor.block]
            for at in range(cursor.turn, len(block.turns)):
                if block.turns[at].gathers:
                    self._issue(block, cursor.repeat, at)
                    cursor.turn = at + 1
                    break
            else:
                cursor.turn, cursor.repeat = 0, cursor.repeat + 1
                if cursor.repeat >= block.segment.count or not _gathers(block):
                    cursor.repeat, cursor.block = 0, cursor.block + 1

    def _issue(self, block: _Block, repeat: int, at: int) -> None:
        turn = block.turns[at]
        place = Place(turn.name, block.segment.name, block.name(repeat), turn.phase)
        found = []
        for number, task in enumerate(turn.tasks):
            if task.mode == "ahead":
                pending = Pending(task, place, self.streams.clock, (at, number))
                self.streams.enqueue(pending)
                found.append(pending)
        self.issued.append(found)

    def _hold_back(self) -> None:
        """Let work stand still while too many reductions are under way."""
        self.streams.serve(self.streams.clock)
        self._served()
        while self.under_way and all(
            p.has_run and p.end <= self.streams.clock for p in self.under_way[0]
        ):
            self.under_way.popleft()
        while len(self.under_way) > self.schedule.behind:
            self._reduced()

    def _reduced(self) -> None:
        """Wait for the oldest reductions."""
        for pending in self.under_way.popleft():
            waited = self.streams.until(pending)
            self._served()
            self.record.waited(pending.task, pending.place, pending.end, waited)

    def _served(self) -> None:
        for ran in self.streams.finished:
            self.record.ran(ran.task, ran.place, ran.start, ran.end)
        self.streams.finished.clear()

    # Blocks that are counted

    def _state(self, block: _Block, number: int, repeat: int, cursor: _Cursor) -> _State:
        """A host that is ahead by more than a block asks for nothing too late within it.

        What is under way is told by its segment, too: the same of a segment before gives memory
        back that no block of this one took.
        """
        streams, now = self.streams, self.streams.clock
        streams.serve(now)
        self._served()
        waiting = [*chain.from_iterable(self.issued), *chain.from_iterable(self.under_way)]
        since = repeat if cursor.block == number else 0
        where = (cursor.block, cursor.repeat - since, cursor.turn)
        shape = (
            where,
            tuple(len(each) for each in self.issued),
            tuple(len(each) for each in self.under_way),
            tuple((p.place.segment, p.key, p.has_run) for p in waiting),
        )
        times = [max(0.0, at - now) for at in streams.free]
        times.append(max(-block.host_seconds, streams.asked - now))
        times += [max(0.0, p.end - now) if p.has_run else 0.0 for p in waiting]
        return _State(shape, times, now, streams.asked, self.record.snapshot())

    def _skip(
        self, block: _Block, number: int, repeat: int, cursor: _Cursor, before: _State
    ) -> int:
        """Count as many blocks as go on alike: until gathers ahead leave the run."""
        ahead = cursor.repeat - repeat if cursor.block == number else 0
        inside = cursor.block == number or not _gathers(block)
        times = block.segment.count - repeat - ahead - 2
        if times < 1 or not inside:
            return 0
        now, asked = self.streams.clock, self.streams.asked
        loses = (asked - before.asked) - (now - before.clock)  # of the host's lead, in a block
        if loses > SAME * (now - before.clock):
            lead = now - asked - block.host_seconds
            times = min(times, int(lead / loses))
            if times < 1:
                return 0
        shift = times * (now - before.clock)
        place = Place("", block.segment.name, block.name(repeat), block.turns[0].phase)
        self.record.repeat(before.sums, times, now, shift, place)
        for pending in chain(*self.issued, *self.under_way):
            if pending.has_run:
                pending.end += shift
        self.streams.shift(shift, times * (asked - before.asked))
        if cursor.block == number:
            cursor.repeat += times
        return times

    def _results(self) -> tuple[Simulation, Timeline]:
        schedule, record = self.schedule, self.record
        step = max(self.streams.clock, self.streams.asked)
        samples, peak = record.memory(schedule.resident)
        streams = (COMPUTE, *schedule.levels)
        collectives = record.collectives()
        spans = tuple(sorted(record.spans.values(), key=lambda span: span.start_seconds))
        where = " ".join(filter(None, (peak.place.operator, peak.place.phase)))
        simulation = Simulation(
            step_seconds=step,
            compute_seconds=record.busy.get(COMPUTE, 0.0),
            communication_seconds=sum(c.seconds for c in collectives),
            exposed_seconds=sum(c.exposed_seconds for c in collectives),
            peak_bytes=peak.bytes,
            peak_by_class={k: v for k, v in peak.by_class.items() if v},
            peak_at=where,
            mfu=schedule.flops / (step * schedule.peak_flops) if step else 0.0,
            utilisation={s: record.busy.get(s, 0.0) / step if step else 0.0 for s in streams},
            collectives=collectives,
            peak_by_block=peak.by_segment(),
        )
        return simulation, Timeline(streams, spans, tuple(samples))


def _gathers(block: _Block) -> bool:
    return any(turn.gathers for turn in block.turns)


def _forward(schedule: Schedule) -> list[_Block]:
    each = (
        (s, (_made(op.name, "forward", op.forward) for op in s.operators))
        for s in schedule.segments
    )
    return _blocks(each, backwards=False)


def _backward(schedule: Schedule) -> list[_Block]:
    each = ((s, _backward_turns(s)) for s in reversed(schedule.segments))
    return _blocks(each, backwards=True)


def _backward_turns(segment: Segment) -> Iterator[_Turn]:
    for op in reversed(segment.operators):
        for again in op.again:
            yield _made(again.name, "recompute", again.tasks)
        yield _made(op.name, "backward", op.backward)


def _update(schedule: Schedule) -> list[_Block]:
    each = (
        (s, (_made(op.name, "update", op.update) for op in s.operators)) for s in schedule.segments
    )
    return _blocks(each, backwards=False)


def _blocks(each: Iterable[tuple[Segment, Iterable[_Turn]]], *, backwards: bool) -> list[_Block]:
    """The blocks in which anything is to be done, with the turns that have tasks."""
    found = ((segment, tuple(turn for turn in turns if turn.tasks)) for segment, turns in each)
    return [_Block(segment, turns, backwards) for segment, turns in found if turns]


def _made(name: str, phase: str, tasks: tuple[Task, ...]) -> _Turn:
    return _Turn(name, phase, tasks, any(task.mode == "ahead" for task in tasks))
