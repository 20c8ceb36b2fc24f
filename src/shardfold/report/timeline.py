"""A step in time as few enough pieces to draw: neighbours too short to be seen are joined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardfold.plans import Plan
from shardfold.plans.drawing_data import stage_timeline
from shardfold.plans.plan import OperatorEntry
from shardfold.plans.plan import Row as Drawn
from shardfold.report.units import seconds as in_seconds
from shardfold.simulate import Sample, Simulation, Timeline

FINEST = 1 / 1500  # of the step: pieces below are joined with what follows
SAMPLES = 700  # of memory, at most
COMPUTE, COMMUNICATION = "compute", "communication"


@dataclass(slots=True)
class Piece:
    """Work of one phase on one stream; `exposed_seconds` is how long compute waited for it."""

    stream: str
    phase: str
    start_seconds: float
    end_seconds: float
    exposed_seconds: float
    what: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Track:
    """Streams and their pieces, memory by class from moment to moment, and a word on both."""

    streams: tuple[str, ...]
    pieces: tuple[Piece, ...]
    memory: tuple[tuple[float, dict[str, float]], ...]
    note: str
    figures: dict[str, str]

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "streams": self.streams,
            "pieces": [
                [
                    self.streams.index(p.stream),
                    p.phase,
                    p.start_seconds,
                    p.end_seconds,
                    p.exposed_seconds,
                    p.what,
                    p.count,
                ]
                for p in self.pieces
            ],
            "memory": self.memory,
            "note": self.note,
            "figures": self.figures,
        }


def additive(plan: Plan, drawn: Sequence[Drawn]) -> Track:
    """The step as the additive cost model has it: one thing after another, nothing hidden."""
    pieces: list[Piece] = []
    clock = 0.0
    for stream, phase, seconds, what in _turns(plan.operators, drawn):
        exposed = seconds if stream == COMMUNICATION else 0.0
        pieces.append(Piece(stream, phase, clock, clock + seconds, exposed, what))
        clock += seconds
    return Track(
        (COMPUTE, COMMUNICATION),
        joined(pieces, clock),
        (),
        "The additive cost: nothing overlaps, so all communication is exposed.",
        {},
    )


def simulated(found: Simulation, timeline: Timeline) -> Track:
    """The step as it was simulated, with communication beside work, and its memory."""
    pieces = [
        Piece(
            span.stream,
            span.phase,
            span.start_seconds,
            span.end_seconds,
            span.exposed_seconds,
            span.operator if span.stream == COMPUTE else f"{span.kind} of {span.operator}",
        )
        for span in sorted(timeline.spans, key=lambda span: span.start_seconds)
    ]
    figures = {
        "simulated step": in_seconds(found.step_seconds),
        "communication in all": in_seconds(found.communication_seconds),
        "model FLOP utilisation": f"{found.mfu:.1%}",
        "memory peaks at": found.peak_at,
    }
    return Track(
        timeline.streams,
        joined(pieces, found.step_seconds),
        tuple((s.seconds, s.bytes) for s in _fewer(timeline.memory, found.step_seconds)),
        "Simulated: all-gathers of parameters run ahead of the work, reductions of gradients "
        "behind it; each level of links has one stream.",
        {name: text for name, text in figures.items() if text},
    )


def of_stages(plan: Plan) -> Track:
    """The stages of a pipeline: forwards and backwards of all micro-batches, and the bubble."""
    found, entry = stage_timeline(plan), plan.pipeline
    assert entry is not None
    pieces = [
        Piece(s.stream, s.phase, s.start_seconds, s.end_seconds, 0.0, s.operator)
        for s in found.spans
    ]
    return Track(
        found.streams,
        joined(pieces, plan.estimate.step_seconds),
        (),
        f"Simulated: a lane for each part of the cluster, schedule {entry.schedule}; 2F0 is the "
        "forward of stage 2 on micro-batch 0, B its backward. Gaps are the bubble.",
        {"simulated step": in_seconds(plan.estimate.step_seconds), "bubble": f"{entry.bubble:.1%}"},
    )


def _fewer(samples: Sequence[Sample], total: float) -> list[Sample]:
    """Few enough samples to draw: the fullest of each stretch of time, and the last."""
    best: dict[int, Sample] = {}
    for sample in samples:
        at = int(SAMPLES * sample.seconds / total) if total else 0
        if at not in best or sample.total > best[at].total:
            best[at] = sample
    return [*best.values(), *samples[-1:]]


def _turns(
    operators: Sequence[OperatorEntry], drawn: Sequence[Drawn]
) -> Iterator[tuple[str, str, float, str]]:
    """Forward in order, backward in reverse, then the update: work, and what is sent for it."""
    for phases, order in (
        (("forward",), range(len(operators))),
        (("recompute", "backward"), range(len(operators) - 1, -1, -1)),
        (("update",), range(len(operators))),
    ):
        for at in order:
            entry = operators[at]
            work = dict(drawn[at].work) if drawn else {}
            what = entry.module or entry.name
            for phase in phases:
                sent = sum(c.seconds for c in entry.collectives if c.phase == phase)
                if sent:
                    yield COMMUNICATION, phase, sent, what
                if work.get(phase):
                    yield COMPUTE, phase, work[phase], what


def joined(pieces: Sequence[Piece], total: float) -> tuple[Piece, ...]:
    """Pieces in which neighbours on a stream, of one phase, are one until they can be seen.

    A gap that cannot be seen is closed; what is exposed adds up.
    """
    least = FINEST * total
    found: list[Piece] = []
    last: dict[tuple[str, bool], Piece] = {}
    for piece in pieces:
        key = (piece.stream, piece.exposed_seconds > 0)
        before = last.get(key)
        if (
            before is not None
            and before.phase == piece.phase
            and piece.start_seconds - before.end_seconds < least
            and before.end_seconds - before.start_seconds < least
        ):
            before.end_seconds = max(before.end_seconds, piece.end_seconds)
            before.exposed_seconds += piece.exposed_seconds
            before.count += 1
            continue
        last[key] = piece
        found.append(piece)
    return tuple(found)
