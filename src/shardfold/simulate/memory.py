"""What memory each operator takes and gives back, forward, again and backward, as PyTorch does.

Forward, an operator takes memory for copies of operands that had to be moved, for its results
(unless they are views), and for what backward needs beside them. A piece of memory is given back
after its last reader, or, if autograd keeps it, after the backward of the first operator that
kept it. Where a stack gathers activations again for backward, it keeps the parts instead of
the copy. Operators that run again keep what they read from others, and take the rest once more
before the first backward that needs it. Backward, an operator takes the gradients of its operands
and gives back those of its results. A parameter is gathered for its reader; its gradient stays
until the update.

Everything is told per operator, so that what holds for one layer between two others holds for
all layers that a graph leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardfold.costs.activations import Region, extras, keeps_results, kept_operands
from shardfold.costs.decision_graph import Edge
from shardfold.costs.memory_format import aliases, fusion_of
from shardfold.costs.operator_steps import points
from shardfold.costs.steps import Collective, Compute, Step
from shardfold.graph import Graph
from shardfold.graph.graph import ITEM_BYTES
from shardfold.operators import Extra
from shardfold.sharding import Space, Subdims
from shardfold.sharding.layouts import Layouts, local_items
from shardfold.simulate.decoded import DecodedChoice
from shardfold.simulate.parts import Part

Row = tuple[int, ...]


class MemoryFacts:
    """What the memory of a graph depends on besides choices; made once for all of them."""

    def __init__(self, graph: Graph, subdims: Subdims, *, regathers: bool = False) -> None:
        self.graph, self.subdims = graph, subdims
        self.regathers = regathers  # keeps parts of activations, and gathers them for backward
        self.aliases = aliases(graph, subdims)
        self.fusion = fusion_of(graph, subdims)  # of a compiled step
        self.saved_operands = [kept_operands(graph, subdims, i) for i in range(len(graph.ops))]
        self.keeps_results = [keeps_results(graph, subdims, i) for i in range(len(graph.ops))]
        self.extras = [extras(graph, subdims, i) for i in range(len(graph.ops))]
        self.writer = {t: i for i, op in enumerate(graph.ops) for t in op.results}
        self.sizes: dict[object, float] = {}

    def result_bytes(self, tensor: int, row: Row, shape: Row) -> float:
        """As `local_bytes`; nothing of what a compiler leaves out of memory."""
        if self.fusion is not None and tensor in self.fusion.absent:
            return 0.0
        return self.local_bytes(tensor, row, shape)

    def gradient_bytes(self, tensor: int, row: Row, shape: Row) -> float:
        """The same of an activation's gradient."""
        if self.fusion is not None and tensor in self.fusion.absent_gradients:
            return 0.0
        return self.local_bytes(tensor, row, shape)

    def local_bytes(self, tensor: int, row: Row, shape: Row) -> float:
        """Bytes of a tensor on the fullest device, under a layout."""
        return self.local_items(tensor, row, shape) * self.graph.tensors[tensor].type.item_bytes

    def local_items(self, tensor: int, row: Row, shape: Row, over: int = 0) -> float:
        """Items of a tensor on the fullest device; with `over`, rows of that many trailing dims."""
        subdims = self.subdims.tensors[tensor]
        key = (subdims, self.subdims.dims[tensor] if over else None, row, over, shape)
        if key not in self.sizes:
            last = len(self.graph.tensors[tensor].type.shape) - over
            pairs = zip(self.subdims.dims[tensor], subdims, strict=True)
            counted = [size if dim < last else 1 for dim, size in pairs]
            self.sizes[key] = float(local_items(np.array([row], np.int8), counted, shape)[0])
        return self.sizes[key]


class LocalLayouts:
    """Where everything lies under one choice: operands, results, stored parameters."""

    def __init__(self, decoded: DecodedChoice, facts: MemoryFacts) -> None:
        self.decoded, self.facts, self.wiring = decoded, facts, decoded.tables.wiring
        self.graph, self.regions = decoded.graph, decoded.tables.regions
        self.shape: Row = tuple(decoded.tables.mesh.shape)
        self.rows: dict[object, Row]  # by operator, its choice, and which of its tensors
        self.extra: dict[object, float]
        self.rows, self.extra = decoded.surroundings.setdefault(("local", facts), ({}, {}))

    def operand_row(self, op: int, position: int) -> Row:
        """How an operator needs an operand to lie."""
        choice = self.decoded.choice[op]
        key = op, choice, position
        if key not in self.rows:
            self.rows[key] = row_of(self.wiring.sides.operand(op, position), choice)
        return self.rows[key]

    def result_row(self, op: int, position: int) -> Row:
        """How an operator leaves a result."""
        choice = self.decoded.choice[op]
        key = op, choice, ~position
        if key not in self.rows:
            self.rows[key] = row_of(self.wiring.sides.result(op, position), choice)
        return self.rows[key]

    def moves(self, edge: int | None, row: Row) -> bool:
        """Whether an operand has to be copied on its way: by steps, or sliced out of the whole."""
        if edge is None:
            return any(state >= 0 for state in row)
        return any(step.phase == "forward" for step in self.decoded.moved(edge))

    def crossing_row(self, tensor: int) -> Row:
        """How a tensor lies as it goes from one part of the model to another."""
        edge = self.wiring.shared_edge.get(tensor)
        if edge is None:
            op = self.facts.writer[tensor]
            return self.result_row(op, self.graph.ops[op].results.index(tensor))
        at = self.decoded.tables.edges[edge]
        return row_of(at.needed, self.decoded.choice[at.target])

    def crossing_bytes(self, tensor: int) -> float:
        """Bytes of a tensor as it goes from one part of the model to another."""
        return self.facts.local_bytes(tensor, self.crossing_row(tensor), self.shape)

    def stored_bytes(self, vertex: int) -> float:
        """Bytes of the part of a parameter that a device keeps."""
        chosen = self.decoded.tables.vertices[vertex]
        assert chosen.layouts is not None
        row = row_of(chosen.layouts, self.decoded.choice[vertex])
        kept = self.graph.kept_type(chosen.index)
        return self.facts.local_items(chosen.index, row, self.shape) * kept.item_bytes

    def extra_bytes(self, op: int, life: str) -> float:
        """Bytes of all that an operator makes beside its results, and that lives so long."""
        key = op, self.decoded.choice[op], life
        if key not in self.extra:
            found = [e for e in self.facts.extras[op] if e.life == life and self._is_there(op, e)]
            self.extra[key] = sum(self._extra_bytes(op, extra) for extra in found)
        return self.extra[key]

    def _is_there(self, op: int, extra: Extra) -> bool:
        return not extra.factor or self._splits(op, extra.factor) == extra.is_split

    def _splits(self, op: int, base: str) -> bool:
        """Whether an operator's configuration splits one of its factors."""
        space = self.wiring.sides.spaces[op]
        row = space.configs[self.decoded.choice[op]].tolist()
        return any(factor >= 0 and space.rule.base(factor) == base for factor in row)

    def _extra_bytes(self, op: int, extra: Extra) -> float:
        called = self.graph.ops[op]
        if extra.points:
            space, at = self.wiring.sides.spaces[op], self.decoded.choice[op]
            chosen = Space(space.rule, space.configs[at : at + 1])
            return float(points(chosen, extra.points, self.decoded.tables.mesh)[0]) * extra.per_item
        tensor = called.results[0] if extra.of < 0 else called.inputs[extra.of]
        row = self.result_row(op, 0) if extra.of < 0 else self.operand_row(op, extra.of)
        return self.facts.local_items(tensor, row, self.shape, extra.over) * extra.per_item


def row_of(layouts: Layouts, choice: int) -> Row:
    """One layout as a plain tuple."""
    return tuple(layouts[choice].tolist())


Bytes = dict[str, float]


@dataclass(slots=True)
class PhaseMemory:
    """What one operator takes as one of its phases begins, and gives as it ends.

    `moved` is taken first, by the collectives that bring operands.
    """

    moved: Bytes = field(default_factory=dict)
    takes: Bytes = field(default_factory=dict)
    gives: Bytes = field(default_factory=dict)

    def key(self) -> object:
        """What it holds, as a value."""
        return tuple(self.moved.items()), tuple(self.takes.items()), tuple(self.gives.items())


@dataclass(slots=True)
class GatheredParameter:
    """A parameter on its way to a reader: the whole part that is used, and its gradient."""

    used: float = 0.0  # 0: used as it is stored
    regathered: bool = False
    gradient: float = 0.0  # as it comes, where it has to be reduced or cast
    sent: float = 0.0  # as it is reduced
    reduced: float = 0.0  # the part that stays

    def key(self) -> object:
        """What it holds, as a value."""
        return self.used, self.regathered, self.gradient, self.sent, self.reduced


def add(into: Bytes, kind: str, size: float) -> None:
    """Put bytes of a class on top of what is there."""
    if size:
        into[kind] = into.get(kind, 0.0) + size


class Gradients:
    """Backward: gradients of activations, and of parameters on their way to be reduced."""

    def __init__(
        self,
        at: LocalLayouts,
        phases: list[PhaseMemory],
        gathered: list[list[GatheredParameter | None]],
        part: Part,
    ) -> None:
        self.at, self.phases, self.gathered, self.part = at, phases, gathered, part
        self.of: dict[int, _Gradient] = {}  # of each tensor, as far as it is summed up
        self.stored: set[int] = set()  # parameters that have a gradient

    def run(self) -> None:
        """Walk over the operators in backward order; gradients come in, and go out."""
        graph, ops = self.at.graph, self.part.ops
        self.of[graph.loss] = _Gradient(0.0, 1)
        for tensor in self.part.sent(graph):
            if graph.tensors[tensor].requires_grad:
                self.of[tensor] = self._new(self.phases[ops[-1]], self.at.crossing_bytes(tensor))
        for op in reversed(ops):
            if graph.has_gradient(op):
                self._operator(op)
        for gradient in self.of.values():
            self._release(gradient, self.phases[ops[0]])

    def _operator(self, op: int) -> None:
        at, graph = self.at, self.at.graph
        phase = self.phases[op]
        results = [self._result(op, t) for t in graph.ops[op].results if t in self.of]
        passes = at.facts.subdims.rules[op].rule.operator.passes_gradient
        for position, tensor in enumerate(graph.ops[op].inputs):
            if not graph.tensors[tensor].requires_grad:
                continue
            if graph.tensors[tensor].role == "parameter":
                self._parameter(op, position, phase)
                continue
            row = at.operand_row(op, position)
            size = at.facts.gradient_bytes(tensor, row, at.shape)
            handed = passes and results and results[0].bytes == size
            gradient = results[0].shared() if handed else self._new(phase, size)
            gradient = self._moved(op, tensor, at.wiring.operand_edge[op][position], gradient)
            if tensor in self.of:  # summed up in place
                self._release(gradient, phase)
            else:
                self.of[tensor] = gradient
        for gradient in results:
            self._release(gradient, phase)
        passing = at.extra_bytes(op, "backward")
        add(phase.takes, "buffers", passing)
        add(phase.gives, "buffers", passing)

    def _result(self, op: int, tensor: int) -> _Gradient:
        """The gradient of a result, moved from the layout that its readers share."""
        gradient = self.of.pop(tensor)
        edge = self.at.wiring.shared_edge.get(tensor)
        return gradient if edge is None else self._moved(op, tensor, edge, gradient, left=True)

    def _moved(
        self, op: int, tensor: int, edge: int | None, gradient: _Gradient, left: bool = False
    ) -> _Gradient:
        if edge is None or not self.at.decoded.moves(edge)[1]:
            return gradient
        at = self.at.decoded.tables.edges[edge]
        row = row_of(at.left, self.at.decoded.choice[at.source])
        size = self.at.facts.local_bytes(tensor, row, self.at.shape)
        found = self._new(self.phases[op], size)
        self._release(gradient, self.phases[op])
        return found

    def _parameter(self, op: int, position: int, phase: PhaseMemory) -> None:
        """Its gradient in full where it is to be reduced, else the part that stays."""
        found = self.gathered[op][position]
        tensor = self.at.graph.ops[op].inputs[position]
        if found is None:
            return
        if tensor in self.stored:
            found.reduced = 0.0
        self.stored.add(tensor)
        if found.gradient:
            add(phase.takes, "buffers", found.gradient)
        else:  # with several passes, it lives until it is added to those before
            alone = self.at.decoded.micro_batches == 1
            add(phase.takes, "gradients" if alone else "buffers", found.reduced)

    def _new(self, phase: PhaseMemory, size: float) -> _Gradient:
        add(phase.takes, "buffers", size)
        return _Gradient(size, 1)

    def _release(self, gradient: _Gradient, phase: PhaseMemory) -> None:
        gradient.holders -= 1
        if not gradient.holders and gradient.bytes:
            add(phase.gives, "buffers", gradient.bytes)


@dataclass(slots=True)
class _Gradient:
    bytes: float
    holders: int

    def shared(self) -> _Gradient:
        self.holders += 1
        return self


@dataclass(slots=True)
class _Memory:
    """A piece of memory: how large, who reads it last, who keeps it for backward."""

    bytes: float
    kind: str = "activations"
    last: int = -1
    inner: bool = False  # made while operators run again
    keepers: list[int] = field(default_factory=list)
    parts: _Memory | None = None  # what it was gathered from, if that is kept in its stead


class Footprint:
    """The memory of every operator of a part of a graph under one choice."""

    def __init__(self, decoded: DecodedChoice, facts: MemoryFacts, part: Part) -> None:
        self.part = part
        self.layouts = LocalLayouts(decoded, facts)
        self.graph, self.regions = decoded.graph, decoded.tables.regions
        count = len(self.graph.ops)
        self.kept_bytes = 0.0  # that autograd keeps as forward ends
        self.forward = [PhaseMemory() for _ in range(count)]
        self.again = [PhaseMemory() for _ in range(count)]
        self.backward = [PhaseMemory() for _ in range(count)]
        known = decoded.surroundings.setdefault(("gathered", facts, part), {})
        self.gathered: list[list[GatheredParameter | None]] = [
            [self._gathered(i, k, known) for k in range(len(self.graph.ops[i].inputs))]
            for i in range(count)
        ]
        self._run()

    def _gathered(
        self, op: int, position: int, known: dict[object, GatheredParameter]
    ) -> GatheredParameter | None:
        """One operand, made once for all choices that agree on it."""
        tensor = self.graph.ops[op].inputs[position]
        edge = self.layouts.wiring.operand_edge[op][position]
        if edge is None or self.graph.tensors[tensor].role != "parameter":
            return None
        choice, at = self.layouts.decoded.choice, self.layouts.decoded.tables.edges[edge]
        key = op, position, choice[at.source], choice[at.target]
        if key not in known:
            known[key] = self._new_gathered(tensor, edge, at)
        return known[key]

    def _new_gathered(self, tensor: int, edge: int, at: Edge) -> GatheredParameter:
        at_place, decoded = self.layouts, self.layouts.decoded
        row = row_of(at.needed, decoded.choice[at.target])
        used = at_place.facts.local_bytes(tensor, row, at_place.shape)
        stored = at_place.stored_bytes(at.source)
        steps = decoded.moves(edge)[0]
        is_copied = any(isinstance(s, Compute) or s.kind != "slice" for s in steps)
        found = GatheredParameter(used if is_copied else 0.0)
        assert at.regathers is not None
        found.regathered = bool(at.regathers[decoded.choice[at.source]]) and not at.is_recomputed
        if at.has_gradient:
            reduces = bool(decoded.moves(edge)[1])
            found.gradient, found.reduced = (used if reduces else 0.0), stored
            found.sent = (
                used if at.cast is None else used / at.item_bytes * ITEM_BYTES[at.cast.sent]
            )
        return found

    # The walk

    def _run(self) -> None:
        ops = [*self.part.makes_again(self.graph), *self.part.ops]
        outside = _Walk(self.layouts, self.forward, ops, {}, recomputing=False)
        outside.receive(self.part.received(self.graph), self.part.ops[0])
        outside.run()
        self.kept_bytes = sum(m.bytes for m in outside.memories if m.keepers)
        self._give_kept(outside)
        for region in (each for each in self.regions.regions if each.ops[0] in self.part.ops):
            visited = region.visited
            inside = _Walk(self.layouts, self.again, visited, outside.place, recomputing=True)
            inside.run()
            self._give_kept(inside)
        Gradients(self.layouts, self.backward, self.gathered, self.part).run()
        self._give_gathered()

    def _give_kept(self, walk: _Walk) -> None:
        """What is kept goes after the backward of the first operator that kept it."""
        for memory in walk.memories:
            if memory.keepers:
                add(self.backward[min(memory.keepers)].gives, memory.kind, memory.bytes)
        for op, size in walk.regathered.items():
            add(self.backward[op].takes, "buffers", size)
            add(self.backward[op].gives, "buffers", size)

    def _give_gathered(self) -> None:
        """A gathered parameter goes after its use; one that is kept, after backward."""
        for op, each in enumerate(self.gathered):
            again = self.regions.runs_again(op)
            for position, found in enumerate(each):
                if found is None or not found.used:
                    continue
                keeps = position in self.layouts.facts.saved_operands[op]
                stays = keeps and not found.regathered and not again
                add((self.backward if stays else self.forward)[op].gives, "buffers", found.used)
                if again:
                    phases = self.backward if keeps else self.again
                    add(phases[op].gives, "buffers", found.used)
                elif found.regathered:
                    add(self.backward[op].gives, "buffers", found.used)


class _Walk:
    """A walk over operators in forward order, of a part of the graph or of what runs again."""

    def __init__(
        self,
        at: LocalLayouts,
        phases: list[PhaseMemory],
        ops: Sequence[int],
        place: Mapping[int, _Memory],
        *,
        recomputing: bool,
    ) -> None:
        self.at, self.phases, self.ops, self.recomputing = at, phases, ops, recomputing
        self.place: dict[int, _Memory] = dict(place)  # where each tensor lies
        self.memories: list[_Memory] = []
        self.regathered: dict[int, float] = {}  # bytes that an operator's backward gathers again

    def receive(self, tensors: Sequence[int], op: int) -> None:
        """Take memory for what comes from another part, before the operator `op`."""
        for tensor in tensors:
            self.place[tensor] = self._new(op, self.at.crossing_bytes(tensor), "activations")

    def run(self) -> None:
        for op in self.ops:
            runs = not self.recomputing or self.at.regions.runs_again(op)
            operands = [
                self._operand(op, k) if runs or self.at.regions.reads_again(op, k) else None
                for k in range(len(self.at.graph.ops[op].inputs))
            ]
            if runs:
                self._results(op, operands)
        self._keep_for_compiled()
        for memory in self.memories:
            if not memory.keepers:
                add(self.phases[memory.last].gives, memory.kind, memory.bytes)

    def _keep_for_compiled(self) -> None:
        """What the partitioner of a compiled step keeps, for whatever backward makes of it."""
        fusion = self.at.facts.fusion
        for tensor, ops in fusion.keepers.items() if fusion is not None else ():
            memory, inside = self.place.get(tensor), set(self.ops)
            if memory is not None and memory.inner == self.recomputing:
                memory.keepers += [op for op in ops if op in inside and self._keeps(op)]

    def _keeps(self, op: int) -> bool:
        """Whether what the operator makes for its backward is kept in this walk."""
        return self.recomputing or not self.at.regions.runs_again(op)

    def _new(self, op: int, size: float, kind: str, *, moved: bool = False) -> _Memory:
        found = _Memory(size, kind, op, self.recomputing)
        self.memories.append(found)
        add(self.phases[op].moved if moved else self.phases[op].takes, kind, size)
        return found

    def _operand(self, op: int, position: int) -> _Memory | None:
        """The memory that an operator reads; a copy where the operand had to be moved."""
        graph, facts = self.at.graph, self.at.facts
        tensor = graph.ops[op].inputs[position]
        if graph.tensors[tensor].role == "parameter":
            return None
        memory = self.place.get(tensor)  # none: an input or a buffer, which is always there
        saves = position in facts.saved_operands[op]
        keeps = saves and (self.recomputing or not self.at.regions.brings_again(op, position))
        if memory is not None and memory.inner == self.recomputing:
            memory.last = op
            region = self._entered(op, tensor)
            if region is not None:
                self._keep(memory, op if saves else region.end)
        row, edge = self.at.operand_row(op, position), self.at.wiring.operand_edge[op][position]
        if self.at.moves(edge, row):
            size = facts.local_bytes(tensor, row, self.at.shape)
            parts = self._parts(edge, memory)
            kept = keeps and parts is None
            memory = self._new(op, size, "activations" if kept else "buffers", moved=True)
            memory.parts = parts
        if memory is not None and keeps and memory.inner == self.recomputing:
            self._keep(memory, op)
        return memory

    def _parts(self, edge: int | None, memory: _Memory | None) -> _Memory | None:
        """What is kept in stead of a gathered copy: the part that it was gathered from."""
        if not self.at.facts.regathers or edge is None or memory is None:
            return None
        steps = self.at.decoded.moves(edge)[0]
        gathers = any(isinstance(s, Collective) and s.kind == "all_gather" for s in steps)
        return memory if gathers and memory.inner == self.recomputing else None

    def _keep(self, memory: _Memory, op: int) -> None:
        if memory.parts is None:
            memory.keepers.append(op)
        else:
            memory.parts.keepers.append(op)
            self.regathered[op] = memory.bytes

    def _entered(self, op: int, tensor: int) -> Region | None:
        """The region that reads a tensor from outside, and so keeps it."""
        region = None if self.recomputing else self.at.regions.of(op)
        writer = self.at.facts.writer.get(tensor, -1)
        if region is None or self.at.regions.of(writer) == region:
            return None
        return self.at.regions.regions[region]

    def _results(self, op: int, operands: list[_Memory | None]) -> None:
        graph, facts = self.at.graph, self.at.facts
        for position, tensor in enumerate(graph.ops[op].results):
            row = self.at.result_row(op, position)
            memory = operands[0] if tensor in facts.aliases else None
            if memory is None and tensor not in facts.aliases:
                size = facts.result_bytes(tensor, row, self.at.shape)
                memory = self._new(op, size, "activations")
            if memory is None:
                continue  # a view of an input
            if facts.keeps_results[op] and tensor not in facts.aliases and self._keeps(op):
                memory.keepers.append(op)
            self.place[tensor] = self._shared(op, tensor, memory)
        if self._keeps(op):
            self._new(op, self.at.extra_bytes(op, "kept"), "activations").keepers.append(op)
        passing = self.at.extra_bytes(op, "forward")
        add(self.phases[op].takes, "buffers", passing)
        add(self.phases[op].gives, "buffers", passing)

    def _shared(self, op: int, tensor: int, memory: _Memory) -> _Memory:
        """The copy in the layout that several readers share, if it had to be moved there."""
        edge = self.at.wiring.shared_edge.get(tensor)
        if edge is None:
            return memory
        at = self.at.decoded.tables.edges[edge]
        row = row_of(at.needed, self.at.decoded.choice[at.target])
        if not self.at.moves(edge, row):
            return memory
        parts = self._parts(edge, memory)
        kind = "activations" if parts is None else "buffers"
        copy = self._new(op, self.at.facts.local_bytes(tensor, row, self.at.shape), kind)
        copy.parts = parts
        return copy


def scratch(step: Step) -> float:
    """Bytes that a collective needs beside what it leaves: parts are put together in a copy."""
    if not isinstance(step, Collective) or step.kind in ("all_reduce", "halo", "ring", "slice"):
        return 0.0
    if step.kind == "all_gather" and step.before is not None and step.after is not None:
        left = {int(b) for b, a in zip(step.before[0], step.after[0], strict=True) if b != a}
        if left == {0}:
            return 0.0  # parts of the outermost dim arrive in place
    return float(step.bytes[0])
