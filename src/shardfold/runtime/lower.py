"""From a captured program and a plan to one device's instructions: no process group, no data.

For every operator: the moves of each operand's edge (values forward, gradients backward), the
local call, and the moves of results to the layout that several readers share. The edges are the
very ones that the planner prices (`shardfold.costs.decision_graph`), with one layout on either
side. Inputs, buffers and what is computed from them alone are whole on every device, and sliced
for free.

The same program on one device: what every plan's numbers are compared with.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardfold.capture import Program
from shardfold.cluster import Mesh
from shardfold.costs.activations import Region
from shardfold.costs.decision_graph import Edge, Leg, Sides, Vertex, shared_tensors, wire
from shardfold.costs.parameters import Storage
from shardfold.plans.read import Decisions
from shardfold.runtime.ops import Local, Site, localise
from shardfold.runtime.process_groups import Axes
from shardfold.runtime.reshard import Casting, Given, Lie, Moves, values
from shardfold.runtime.shards import Extent, Place, Row
from shardfold.sharding import Space, Subdims
from shardfold.sharding.layouts import REPLICATED, Layouts


@dataclass(frozen=True, slots=True)
class Feed:
    """A tensor on its way from one layout to another."""

    tensor: int
    there: Moves
    back: Moves | None = None  # None: no gradient comes back
    requires_grad: bool = False  # of the tensor, which may have a gradient from others
    regathers: bool = False  # moved again for backward instead of being kept
    owns_value: bool = False  # nobody else reads the value: it may be written to
    owns_gradient: bool = False  # the gradient that comes is new: it may be written to
    onward: Moves | None = None  # of the last gradient of several: where their sum goes then
    row: Row | None = None  # of a result that several read: how it lies then
    cast: Casting | None = None  # of a parameter that is kept in another dtype

    @property
    def moves(self) -> bool:
        """Whether anything is to be done in either direction."""
        return bool(self.there) or bool(self.back) or self.cast is not None


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operator on one device."""

    site: Site
    feeds: tuple[Feed, ...]
    local: Local
    results: tuple[int, ...]
    left: tuple[Row, ...]  # the layout of each result, as the operator leaves it
    shared: tuple[Feed | None, ...]  # for each result: to the layout that its readers share
    has_gradient: bool
    writes: tuple[int, ...]  # operands that are written, of which this device has a part
    drops: tuple[int, ...]  # tensors that nobody reads after this

    def shape(self, result: int) -> tuple[int, ...]:
        """The part of a result that this device has, as its readers find it."""
        shared = self.shared[result]
        return self.site.results[result].shape if shared is None else shared.there.target

    def layout(self, result: int) -> Row:
        """The layout in which readers find a result."""
        shared = self.shared[result]
        return self.left[result] if shared is None or shared.row is None else shared.row


@dataclass(frozen=True, slots=True)
class Written:
    """A buffer that an operator writes, of which this device may have a part: there and back."""

    tensor: int
    there: Moves
    back: Moves


@dataclass(frozen=True, slots=True)
class Stored:
    """A parameter's storage: its layout, and the part that this device keeps."""

    tensor: int
    row: Row
    extent: Extent
    mesh: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lowered:
    """All that one device does in a step."""

    mesh: Mesh
    place: Place
    instructions: tuple[Instruction, ...]
    parameters: tuple[Stored, ...]
    written: tuple[Written, ...]  # buffers that are written in parts
    inputs: Mapping[int, Given] = field(default_factory=dict)  # how the batch may come
    again: tuple[Region, ...] = ()  # instructions that run again before backward
    ahead: int = 1  # readers of gathered parameters whose gathers may be under way before

    def background_axes(self) -> set[Axes]:
        """Every set of axes on which a parameter is gathered or its gradient reduced."""
        parameters = {stored.tensor for stored in self.parameters}
        levels = [axis.level for axis in self.mesh.axes]
        found: set[Axes] = set()
        for instruction in self.instructions:
            for feed in instruction.feeds:
                if feed.tensor in parameters and feed.requires_grad:
                    legs = [moves for moves in (feed.there, feed.back, feed.onward) if moves]
                    steps = [step for moves in legs for step in moves.steps]
                    found.update(s.axes for s in steps if s.kind != "slice")
                    found.add(feed.there.at_once("all_gather", levels) or ())
                    back = feed.back or Moves((), (), ())
                    found.add(back.at_once("reduce_scatter", levels) or ())
        return found - {()}

    def axes(self) -> set[Axes]:
        """Every set of axes on which some step or exchange needs a process group."""
        found: set[Axes] = set()
        for instruction in self.instructions:
            for feed in (*instruction.feeds, *instruction.shared):
                for moves in (feed.there, feed.back, feed.onward) if feed is not None else ():
                    found.update(s.axes for s in moves.steps if s.kind != "slice") if moves else ()
            site = instruction.site
            found.update(site.axes(e.factor) for e in site.rule.rule.exchanges)
        for buffer in self.written:
            found.update(step.axes for step in buffer.back.steps)
        for given in self.inputs.values():
            found.update(step.axes for step in given.from_part.steps)
        return found - {()}


def lower(
    program: Program,
    subdims: Subdims,
    decisions: Decisions,
    place: Place,
) -> Lowered:
    """The instructions of the device at `place`; splits that cannot be run are refused here."""
    return _Lowering(program, subdims, decisions, place).run()


class _Lowering:
    def __init__(
        self,
        program: Program,
        subdims: Subdims,
        decisions: Decisions,
        place: Place,
    ) -> None:
        self.program, self.graph, self.subdims = program, program.graph, subdims
        self.place = place
        self.decisions = decisions
        self.whole: Row = (REPLICATED,) * len(place.shape)
        self.sides = Sides(decisions.configs)
        self.wiring = wire(self.graph, subdims, self._vertices(), self.sides, decisions.regions)
        self.readers = self.graph.readers()
        self.operators = [rule.rule.operator for rule in subdims.rules]
        self.made = {
            t: operator.makes_result
            for op, operator in zip(self.graph.ops, self.operators, strict=True)
            for t in op.results
        }
        self.cache: dict[tuple[object, ...], Moves] = {}

    def _vertices(self) -> list[Vertex]:
        """The plan's decisions, each with the one choice that was made."""
        given = self.decisions
        found = [Vertex("op", i, space=space) for i, space in enumerate(given.configs)]
        found += [Vertex("tensor", t, layouts=_layouts(row)) for t, row in given.shared.items()]
        for tensor, row in given.stored.items():
            storage = Storage(_layouts(row), np.array([tensor in given.regathers]))
            found.append(Vertex("parameter", tensor, layouts=storage.layouts, storage=storage))
        return found

    def run(self) -> Lowered:
        last = {t: i for i, op in enumerate(self.graph.ops) for t in op.inputs}
        drops: dict[int, list[int]] = {}
        for tensor, reader in last.items():
            if tensor != self.graph.loss:
                drops.setdefault(reader, []).append(tensor)
        instructions = tuple(
            self._instruction(i, tuple(drops.get(i, ()))) for i in range(len(self.graph.ops))
        )
        parameters = tuple(
            Stored(t, row, self._lie(t).extent(values(row)), self.place.shape)
            for t, row in sorted(self.decisions.stored.items())
        )
        written = tuple(self._written())
        return Lowered(
            self.decisions.mesh,
            self.place,
            instructions,
            parameters,
            written,
            again=self.decisions.regions.regions,
        )

    def _written(self) -> Iterator[Written]:
        """Running statistics, where a device only updates those of its own channels."""
        for index, op in enumerate(self.graph.ops):
            for k, operand in enumerate(op.operands):
                is_written = operand.name in self.operators[index].writes
                if not is_written or operand.tensor not in self.program.sources:
                    continue
                needed = values(_first(self.sides.operand(index, k)))
                there = self._moves(operand.tensor, self.whole, needed)
                if there:
                    back = self._moves(operand.tensor, needed, self.whole)
                    yield Written(operand.tensor, there, back)

    def _instruction(self, index: int, drops: tuple[int, ...]) -> Instruction:
        op, space = self.graph.ops[index], self.decisions.configs[index]
        needed = [_first(self.sides.operand(index, k)) for k in range(len(op.inputs))]
        left = [_first(self.sides.result(index, k)) for k in range(len(op.results))]
        site = Site(
            index,
            op,
            self.program.calls[index],
            space.rule,
            _first(space.configs),
            self.place,
            tuple(
                self._lie(t).extent(values(row)) for t, row in zip(op.inputs, needed, strict=True)
            ),
            tuple(
                self._lie(t).extent(values(row)) for t, row in zip(op.results, left, strict=True)
            ),
        )
        feeds = tuple(self._feed(index, k, row) for k, row in enumerate(needed))
        shared = tuple(map(self._share, op.results))
        has_gradient = self.graph.has_gradient(index)
        local = localise(site)
        written = self.operators[index].writes
        writes = tuple(k for k, o in enumerate(op.operands) if o.name in written and feeds[k].there)
        return Instruction(
            site, feeds, local, op.results, tuple(left), shared, has_gradient, writes, drops
        )

    def _feed(self, reader: int, operand: int, needed: Row) -> Feed:
        """From where a tensor lies to where its reader needs it."""
        tensor = self.graph.ops[reader].inputs[operand]
        number = self.wiring.operand_edge[reader][operand]
        if number is None:
            return Feed(tensor, self._moves(tensor, self.whole, values(needed)))
        edge = self.wiring.edges[number]
        if edge.storage is not None:
            return self._edge(edge)
        is_only = tensor not in self.wiring.shared_edge
        return replace(
            self._edge(edge),
            owns_value=is_only and self.made[tensor],
            owns_gradient=self._makes_gradient(reader, operand),
        )

    def _share(self, tensor: int) -> Feed | None:
        """From where an operator leaves its result to the layout that its readers share."""
        number = self.wiring.shared_edge.get(tensor)
        if number is None:
            return None
        anew = all(self._makes_gradient(*reader) for reader in self.readers.get(tensor, ()))
        return replace(
            self._edge(self.wiring.edges[number]),
            owns_value=self.made[tensor],
            owns_gradient=anew and tensor != self.graph.loss,
            row=self.decisions.shared[tensor],
        )

    def _makes_gradient(self, reader: int, operand: int) -> bool:
        name = self.graph.ops[reader].operands[operand].name
        return name in self.operators[reader].makes_gradients

    def _edge(self, edge: Edge) -> Feed:
        """The legs of an edge on this device."""
        legs = {leg.what: self._leg(edge, leg) for leg in edge.legs()}
        regathers = edge.regathers is not None and bool(edge.regathers[0])
        return Feed(
            edge.tensor,
            legs["value"],
            legs.get("gradient"),
            self.graph.tensors[edge.tensor].requires_grad,
            regathers=regathers and bool(legs["value"]),
            onward=legs.get("sum"),
            cast=None if edge.cast is None else Casting.of(edge.cast),
        )

    def _leg(self, edge: Edge, leg: Leg) -> Moves:
        ends = (_first(leg.source), _first(leg.target))
        key = (self._lie(edge.tensor), *ends)
        if key not in self.cache:
            steps = edge.steps(leg, self.place.shape).case(0)
            self.cache[key] = self._lie(edge.tensor).local(steps, *ends)
        return self.cache[key]

    def _moves(self, tensor: int, source: Row, target: Row) -> Moves:
        return self._lie(tensor).moves(source, target, "forward")

    def _lie(self, tensor: int) -> Lie:
        kind = self.graph.tensors[tensor].type
        return Lie(kind, self.subdims.tensors[tensor], self.subdims.dims[tensor], self.place)


def part_of(
    lowered: Lowered, ops: Sequence[int], before: Sequence[int], tied: Container[int]
) -> Lowered:
    """The instructions of a stage: a stretch of operators, and those before it that it repeats.

    What comes from other stages is nobody's to write to: autograd keeps it. Gradients of `tied`
    parameters, which other stages read, too, do not go on from here: only their sum does.
    """
    own = [*before, *ops]
    made = {t for op in own for t in lowered.instructions[op].results}
    instructions = tuple(_apart(lowered.instructions[op], made, tied) for op in own)
    read = {feed.tensor for instruction in instructions for feed in instruction.feeds}
    shift = len(before) - (ops[0] if ops else 0)
    inside = [r for r in lowered.again if ops and ops[0] <= r.ops[0] and r.end <= ops[-1]]
    return replace(
        lowered,
        instructions=instructions,
        parameters=tuple(stored for stored in lowered.parameters if stored.tensor in read),
        written=tuple(written for written in lowered.written if written.tensor in read),
        inputs={tensor: given for tensor, given in lowered.inputs.items() if tensor in read},
        again=tuple(r.shifted(shift) for r in inside),
    )


def _apart(instruction: Instruction, made: set[int], tied: Container[int]) -> Instruction:
    feeds = tuple(
        replace(
            feed,
            owns_value=feed.owns_value and feed.tensor in made,
            onward=None if feed.tensor in tied else feed.onward,
        )
        for feed in instruction.feeds
    )
    return replace(instruction, feeds=feeds)


def _first(rows: Layouts) -> Row:
    return tuple(rows[0].tolist())


def _layouts(row: Row) -> Layouts:
    return np.array([row], dtype=np.int8).reshape(1, len(row))


def alone(program: Program, subdims: Subdims) -> Lowered:
    """The instructions of a mesh without axes: nothing split, nothing sent."""
    spaces = tuple(Space(rule, np.zeros((1, 0), dtype=np.int8)) for rule in subdims.rules)
    stored: dict[int, tuple[int, ...]] = dict.fromkeys(program.graph.parameters(), ())
    shared: dict[int, tuple[int, ...]] = dict.fromkeys(shared_tensors(program.graph), ())
    decisions = Decisions(Mesh(()), spaces, shared, stored, frozenset())
    return lower(program, subdims, decisions, Place((), ()))
