"""What a drawing of a plan needs beyond its decisions: who reads whom, factors, layouts, moves.

Operators that look alike share a `Face`; those that also read and move alike share a `Row`. What
an operator reads is told from where it stands, so that the layers of a run share their rows, and
a model of any depth has a short sketch. The stages of a pipeline are drawn over time, with a track
for each part of the cluster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby

import msgspec

from shardfold.costs.steps import Collective, Compute
from shardfold.errors import PlanError
from shardfold.graph.repeats import operator_order
from shardfold.pipeline import Pipeline, StageTimes, timeline
from shardfold.plans.entries import layout_words
from shardfold.plans.plan import Face, Move, Plan, Row, Side, Sketch
from shardfold.sharding.layouts import Layouts
from shardfold.simulate import Span, Timeline
from shardfold.simulate.decoded import DecodedChoice, UnrolledChoice

OUTSIDE = 0  # what an operand reads that no operator writes: an input, a parameter, a buffer


def sketch(unrolled: UnrolledChoice) -> Sketch:
    """The sketch of a solved model, every layer of it."""
    return _Drawer(unrolled).sketch()


def expanded(sketch: Sketch) -> Iterator[Row]:
    """The row of every operator, in execution order."""
    for rows, times in sketch.pieces:
        for _ in range(times):
            yield from (sketch.rows[row] for row in rows)


def written_by(row: Row, at: int) -> tuple[int | None, ...]:
    """For each operand of the operator at place `at`: the place of the operator that wrote it."""
    return tuple(
        None if read == OUTSIDE else at - read if read > 0 else -read - 1 for read in row.reads
    )


class _Drawer:
    """Collects faces and rows, each once."""

    def __init__(self, unrolled: UnrolledChoice) -> None:
        self.unrolled, self.graph = unrolled, unrolled.decoded.graph
        self.faces: dict[Face, int] = {}
        self.rows: dict[Row, int] = {}
        self.writer = {t: i for i, op in enumerate(self.graph.ops) for t in op.results}
        # Where each operator first stands in the whole model.
        self.place: dict[int, int] = {}
        for at, (op, _, _) in enumerate(operator_order(self.graph)):
            self.place.setdefault(op, at)

    def sketch(self) -> Sketch:
        known: dict[tuple[int, int], tuple[int, ...]] = {}
        periods: list[tuple[int, ...]] = []
        at = 0
        for run in self.unrolled.runs:
            periods += self._alone(range(at, run.repeat.start))
            for order in range(run.repeat.count):
                decoded, period = run.period(order)
                key = (id(decoded), period)
                if key not in known:
                    views = _Views(decoded)
                    ops = run.repeat.ops(period)
                    known[key] = tuple(self._row(views, op) for op in ops)
                periods.append(known[key])
            at = run.repeat.end
        periods += self._alone(range(at, len(self.graph.ops)))
        pieces = tuple((rows, len(list(same))) for rows, same in groupby(periods))
        return Sketch(tuple(self.faces), tuple(self.rows), pieces)

    def _alone(self, ops: range) -> list[tuple[int, ...]]:
        views = _Views(self.unrolled.decoded)
        return [tuple(self._row(views, op) for op in ops)] if ops else []

    def _row(self, views: _Views, op: int) -> int:
        face = views.face(op)
        number = self.faces.setdefault(face, len(self.faces))
        row = Row(number, self._reads(op), views.moves(op), views.work(op))
        return self.rows.setdefault(row, len(self.rows))

    def _reads(self, op: int) -> tuple[int, ...]:
        """How far back each operand was written; what was before a run counts from the start."""
        run = next((r for r in self.graph.repeats if r.period_of(op) is not None), None)
        found = []
        for tensor in self.graph.ops[op].inputs:
            at = self.writer.get(tensor)
            if at is None:
                found.append(OUTSIDE)
            elif run is not None and at < run.start:
                found.append(-self.place[at] - 1)
            elif run is None or run.period_of(at) is not None:
                near = op - at if run is not None else self._back(op, at)
                found.append(near)
        return tuple(found)

    def _back(self, op: int, at: int) -> int:
        """How far operator `at` lies before `op`: what a run wrote last is what is read of it."""
        inside = next((r for r in self.graph.repeats if r.period_of(at) is not None), None)
        place = self.place[at]
        if inside is not None and inside.period_of(at) != 0:
            left = inside.end - at  # operators from `at` to the end of its run
            place = self.place[inside.start] + inside.length * inside.count - left
        return self.place[op] - place


class _Views:
    """What a decoded choice says of its operators."""

    def __init__(self, decoded: DecodedChoice) -> None:
        self.decoded, self.wiring = decoded, decoded.tables.wiring

    def face(self, op: int) -> Face:
        """The factors and the tensors of an operator, as it is split."""
        sides, choice = self.wiring.sides, self.decoded.choice[op]
        space, call = sides.spaces[op], self.decoded.graph.ops[op]
        words = self.decoded.splits.names(op, space)
        factors = tuple(zip(space.rule.factors, words, space.rule.sizes, strict=True))
        operands = [
            self._side(o.name, o.tensor, sides.operand(op, k), choice)
            for k, o in enumerate(call.operands)
        ]
        results = [
            self._side("", tensor, sides.result(op, k), choice)
            for k, tensor in enumerate(call.results)
        ]
        return Face(str(space.rule.rule), factors, tuple(operands), tuple(results))

    def _side(self, name: str, tensor: int, layouts: Layouts, choice: int) -> Side:
        found = self.decoded.graph.tensors[tensor]
        states = layout_words(self.decoded.subdims, tensor, layouts, choice)
        return Side(name, found.role, found.type.dtype, found.type.shape, states)

    def moves(self, op: int) -> tuple[Move, ...]:
        """The collectives of the edges that an operator pays for.

        Those bring operands to the layouts that it needs; results, numbered from -1 downwards, to
        the layout that their readers share.
        """
        edges = list(enumerate(self.wiring.operand_edge[op]))
        for k, tensor in enumerate(self.decoded.graph.ops[op].results):
            edges.append((-1 - k, self.wiring.shared_edge.get(tensor)))
        found: dict[tuple[int, str, str, tuple[str, ...]], list[float]] = defaultdict(list)
        names = self.decoded.tables.mesh.names
        for operand, edge in edges:
            for step in () if edge is None else self.decoded.moved(edge):
                if isinstance(step, Collective) and step.kind != "slice":
                    axes = tuple(names[a] for a in step.axes)
                    found[operand, step.phase, step.kind, axes].append(float(step.bytes[0]))
        return tuple(Move(*key, sum(sizes)) for key, sizes in found.items())

    def work(self, op: int) -> tuple[tuple[str, float], ...]:
        """Seconds of the operator's local work in all passes, phase by phase."""
        found: dict[str, float] = defaultdict(float)
        for step in self.decoded.steps[op]:
            if isinstance(step, Compute):
                found[step.phase] += self.decoded.total(step)
        return tuple(found.items())


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
