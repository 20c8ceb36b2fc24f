"""What memory each operator takes and gives back, forward, again and backward, as PyTorch does.

Forward, an operator takes memory for copies of operands that had to be moved, for its results
(unless they are views), and for what backward needs beside them. A piece of memory is given back
after its last reader, or, if autograd keeps it, after the backward of the first operator that
kept it. A block that is run again keeps what it reads from outside, and takes the rest once more
before its backward. Backward, an operator takes the gradients of its operands and gives back those
of its results. A parameter is gathered for its reader; its gradient stays until the update.

Everything is told per operator, so that what holds for one layer between two others holds for
all layers that a graph leaves out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shardfold.costs import Tabulated
from shardfold.costs.aliases import CASTS, DROPOUTS, PERMUTED, RESHAPED, aliases
from shardfold.costs.saved import Extra, extras, keeps_results, kept_operands
from shardfold.costs.steps import Collective, Step
from shardfold.graph import Graph
from shardfold.plans.assemble import Assembly
from shardfold.spaces import Atoms, Space
from shardfold.spaces.layout import Layouts

Row = tuple[int, ...]
Bytes = dict[str, float]
# Backward, these hand the gradient of their result on as it is, or as a view.
PASSED_ON = frozenset((*RESHAPED, *PERMUTED, *CASTS, *DROPOUTS, "contiguous", "add", "sub"))


@dataclass(slots=True)
class Turn:
    """What one operator takes as one of its phases begins, and gives as it ends.

    `moved` is taken first, by the collectives that bring operands.
    """

    moved: Bytes = field(default_factory=dict)
    takes: Bytes = field(default_factory=dict)
    gives: Bytes = field(default_factory=dict)


@dataclass(slots=True)
class Gathered:
    """A parameter on its way to a reader: the whole part that is used, and its gradient."""

    used: float = 0.0  # 0: used as it is stored
    regathered: bool = False
    gradient: float = 0.0  # before it is reduced, where it has to be
    reduced: float = 0.0  # the part that stays


@dataclass(slots=True)
class _Memory:
    """A piece of memory: how large, who reads it last, who keeps it for backward."""

    bytes: float
    kind: str = "activations"
    last: int = -1
    inner: bool = False  # made while a block is run again
    keepers: list[int] = field(default_factory=list)


class Facts:
    """What the memory of a graph depends on besides choices; made once for all of them."""

    def __init__(self, graph: Graph, atoms: Atoms) -> None:
        self.graph, self.atoms = graph, atoms
        self.aliases = aliases(graph)
        self.kept = [kept_operands(graph, atoms, i) for i in range(len(graph.ops))]
        self.keeps_results = [keeps_results(graph, atoms, i) for i in range(len(graph.ops))]
        self.extras = [extras(graph, i) for i in range(len(graph.ops))]
        self.writer = {t: i for i, op in enumerate(graph.ops) for t in op.results}
        self.sizes: dict[object, float] = {}

    def local_bytes(self, tensor: int, row: Row, shape: Row) -> float:
        """Bytes of a tensor on the fullest device, under a layout."""
        return self.local_items(tensor, row, shape) * self.graph.tensors[tensor].type.item_bytes

    def local_items(self, tensor: int, row: Row, shape: Row, over: int = 0) -> float:
        """Items of a tensor on the fullest device; with `over`, rows of that many trailing dims."""
        atoms = self.atoms.tensors[tensor]
        key = (atoms, self.atoms.dims[tensor] if over else None, row, over, shape)
        if key not in self.sizes:
            parts = [1] * len(atoms)
            for state, size in zip(row, shape, strict=True):
                if state >= 0:
                    parts[state] *= size
            last = len(self.graph.tensors[tensor].type.shape) - over
            items = 1
            for dim, size, n in zip(self.atoms.dims[tensor], atoms, parts, strict=True):
                items *= -(-size // n) if dim < last else 1
            self.sizes[key] = float(items)
        return self.sizes[key]


class Wiring:
    """Which edge brings which operand, for the tables of one mesh; made once for all choices."""

    def __init__(self, graph: Graph, tabulated: Tabulated) -> None:
        self.vertex = {v.index: k for k, v in enumerate(tabulated.vertices) if v.space is not None}
        waiting: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.kept: dict[int, int] = {}  # tensor: the edge into the layout it is kept in
        for number, edge in enumerate(tabulated.edges):
            if tabulated.vertices[edge.target].space is None:
                self.kept[edge.tensor] = number
            else:
                waiting[edge.target, edge.tensor].append(number)
        self.rows: dict[object, Row] = {}  # layouts of operands and results, by configuration
        self.operands: list[tuple[int | None, ...]] = []
        for index, op in enumerate(graph.ops):
            found: list[int | None] = []
            for tensor in op.inputs:
                edges = waiting.get((self.vertex[index], tensor))
                found.append(edges.pop(0) if edges else None)
            self.operands.append(tuple(found))


class Footprint:
    """The memory of every operator of a graph under one choice."""

    def __init__(self, assembly: Assembly, facts: Facts, wiring: Wiring) -> None:
        self.assembly, self.facts, self.wiring = assembly, facts, wiring
        self.graph, self.regions = assembly.graph, assembly.tabulated.regions
        self.shape: Row = tuple(assembly.tabulated.mesh.shape)
        count = len(self.graph.ops)
        self.kept_bytes = 0.0  # that autograd keeps as forward ends
        self.forward = [Turn() for _ in range(count)]
        self.again = [Turn() for _ in range(count)]
        self.backward = [Turn() for _ in range(count)]
        self.gathered: list[list[Gathered | None]] = [
            [self._gathered(i, k) for k in range(len(self.graph.ops[i].inputs))]
            for i in range(count)
        ]
        self._run()

    # Where things lie

    def operand_row(self, op: int, position: int) -> Row:
        """How an operator needs an operand to lie."""
        edge = self.wiring.operands[op][position]
        if edge is not None:
            at = self.assembly.tabulated.edges[edge]
            return _row(at.needed, self.assembly.choice[at.target])
        vertex = self.wiring.vertex[op]
        space = self.assembly.tabulated.vertices[vertex].space
        assert space is not None
        return self._known("operand", space, position, self.assembly.choice[vertex])

    def result_row(self, op: int, position: int) -> Row:
        """How an operator leaves a result."""
        vertex = self.wiring.vertex[op]
        space = self.assembly.tabulated.vertices[vertex].space
        assert space is not None
        return self._known("result", space, position, self.assembly.choice[vertex])

    def _known(self, side: str, space: Space, position: int, choice: int) -> Row:
        key = (side, id(space), position, choice)
        rows = self.wiring.rows
        if key not in rows:
            one = Space(space.rule, space.configs[choice : choice + 1])
            take = one.operand_layouts if side == "operand" else one.result_layouts
            rows[key] = _row(take(position), 0)
        return rows[key]

    def _moves(self, edge: int | None, row: Row) -> bool:
        """Whether an operand has to be copied on its way: by steps, or sliced out of the whole."""
        if edge is None:
            return any(state >= 0 for state in row)
        return any(step.phase == "forward" for step in self.assembly.moved(edge))

    def _gathered(self, op: int, position: int) -> Gathered | None:
        tensor, edge = self.graph.ops[op].inputs[position], self.wiring.operands[op][position]
        if edge is None or self.graph.tensors[tensor].role != "parameter":
            return None
        at = self.assembly.tabulated.edges[edge]
        row = _row(at.needed, self.assembly.choice[at.target])
        used = self.facts.local_bytes(tensor, row, self.shape)
        stored = self.stored_bytes(at.source)
        values = self.assembly.moves(edge)[0]
        found = Gathered(used if values else 0.0)
        assert at.regathers is not None
        found.regathered = bool(at.regathers[self.assembly.choice[at.source]]) and not at.again
        if self.graph.tensors[tensor].requires_grad and self._flows(op):
            reduces = bool(self.assembly.moves(edge)[1])
            found.gradient, found.reduced = (used if reduces else 0.0), stored
        return found

    def stored_bytes(self, vertex: int) -> float:
        """Bytes of the part of a parameter that a device keeps."""
        chosen = self.assembly.tabulated.vertices[vertex]
        assert chosen.layouts is not None
        row = _row(chosen.layouts, self.assembly.choice[vertex])
        return self.facts.local_bytes(chosen.index, row, self.shape)

    def extra_bytes(self, op: int, extra: Extra) -> float:
        """Bytes of what an operator makes beside its results."""
        called = self.graph.ops[op]
        tensor = called.results[0] if extra.of < 0 else called.inputs[extra.of]
        row = self.result_row(op, 0) if extra.of < 0 else self.operand_row(op, extra.of)
        return self.facts.local_items(tensor, row, self.shape, extra.over) * extra.per_item

    def _flows(self, op: int) -> bool:
        return any(self.graph.tensors[t].requires_grad for t in self.graph.ops[op].results)

    # The walk

    def _run(self) -> None:
        count = len(self.graph.ops)
        outside = _Walk(self, self.forward, range(count), {}, recomputing=False)
        outside.run()
        self.kept_bytes = sum(m.bytes for m in outside.memories if m.keepers)
        self._give_kept(outside)
        for region in self.regions.ranges:
            inside = _Walk(self, self.again, region, outside.place, recomputing=True)
            inside.run()
            self._give_kept(inside)
        _Gradients(self).run()
        self._give_gathered()

    def _give_kept(self, walk: _Walk) -> None:
        """What is kept goes after the backward of the first operator that kept it."""
        for memory in walk.memories:
            if memory.keepers:
                _add(self.backward[min(memory.keepers)].gives, memory.kind, memory.bytes)

    def _give_gathered(self) -> None:
        """A gathered parameter goes after its use; one that is kept, after backward."""
        for op, each in enumerate(self.gathered):
            region = self.regions.of(op)
            for position, found in enumerate(each):
                if found is None or not found.used:
                    continue
                keeps = position in self.facts.kept[op]
                again = region is not None
                stays = keeps and not found.regathered and not again
                _add((self.backward if stays else self.forward)[op].gives, "buffers", found.used)
                if again:
                    turns = self.backward if keeps else self.again
                    _add(turns[op].gives, "buffers", found.used)
                elif found.regathered:
                    _add(self.backward[op].gives, "buffers", found.used)


class _Walk:
    """A walk over operators in forward order, of the whole graph or of a block run again."""

    def __init__(
        self,
        footprint: Footprint,
        turns: list[Turn],
        ops: range,
        place: Mapping[int, _Memory],
        *,
        recomputing: bool,
    ) -> None:
        self.at, self.turns, self.ops, self.recomputing = footprint, turns, ops, recomputing
        self.place: dict[int, _Memory] = dict(place)  # where each tensor lies
        self.memories: list[_Memory] = []

    def run(self) -> None:
        for op in self.ops:
            runs = not self.recomputing or self.at.regions.runs_again(op)
            operands = [self._operand(op, k) for k in range(len(self.at.graph.ops[op].inputs))]
            if runs:
                self._results(op, operands)
        for memory in self.memories:
            if not memory.keepers:
                _add(self.turns[memory.last].gives, memory.kind, memory.bytes)

    def _keeps(self, op: int) -> bool:
        """Whether what the operator keeps is kept in this walk."""
        return self.recomputing or self.at.regions.of(op) is None

    def _new(self, op: int, size: float, kind: str, *, moved: bool = False) -> _Memory:
        found = _Memory(size, kind, op, self.recomputing)
        self.memories.append(found)
        _add(self.turns[op].moved if moved else self.turns[op].takes, kind, size)
        return found

    def _operand(self, op: int, position: int) -> _Memory | None:
        """The memory that an operator reads; a copy where the operand had to be moved."""
        graph, facts = self.at.graph, self.at.facts
        tensor = graph.ops[op].inputs[position]
        if graph.tensors[tensor].role == "parameter":
            return None
        memory = self.place.get(tensor)  # none: an input or a buffer, which is always there
        keeps = position in facts.kept[op] and self._keeps(op)
        if memory is not None and memory.inner == self.recomputing:
            memory.last = op
            if self._enters(op, tensor):
                memory.keepers.append(op)
        row, edge = self.at.operand_row(op, position), self.at.wiring.operands[op][position]
        if self.at._moves(edge, row):
            size = facts.local_bytes(tensor, row, self.at.shape)
            memory = self._new(op, size, "activations" if keeps else "buffers", moved=True)
        if memory is not None and keeps and memory.inner == self.recomputing:
            memory.keepers.append(op)
        return memory

    def _enters(self, op: int, tensor: int) -> bool:
        """Whether a block that is run again reads a tensor from outside, and so keeps it."""
        region = None if self.recomputing else self.at.regions.of(op)
        if region is None:
            return False
        writer = self.at.facts.writer.get(tensor)
        return writer is None or self.at.regions.of(writer) != region

    def _results(self, op: int, operands: list[_Memory | None]) -> None:
        graph, facts = self.at.graph, self.at.facts
        for position, tensor in enumerate(graph.ops[op].results):
            row = self.at.result_row(op, position)
            memory = operands[0] if tensor in facts.aliases else None
            if memory is None and tensor not in facts.aliases:
                size = facts.local_bytes(tensor, row, self.at.shape)
                memory = self._new(op, size, "activations")
            if memory is None:
                continue  # a view of an input
            if facts.keeps_results[op] and tensor not in facts.aliases and self._keeps(op):
                memory.keepers.append(op)
            self.place[tensor] = self._kept(op, tensor, memory)
        if self._keeps(op):
            for size in self._extras(op):
                self._new(op, size, "activations").keepers.append(op)

    def _kept(self, op: int, tensor: int, memory: _Memory) -> _Memory:
        """The copy in which a tensor is kept for several readers, if it had to be moved there."""
        edge = self.at.wiring.kept.get(tensor)
        if edge is None:
            return memory
        at = self.at.assembly.tabulated.edges[edge]
        row = _row(at.needed, self.at.assembly.choice[at.target])
        if not self.at._moves(edge, row):
            return memory
        return self._new(op, self.at.facts.local_bytes(tensor, row, self.at.shape), "activations")

    def _extras(self, op: int) -> Iterator[float]:
        return (self.at.extra_bytes(op, e) for e in self.at.facts.extras[op] if e.kept)


class _Gradients:
    """Backward: gradients of activations, and of parameters on their way to be reduced."""

    def __init__(self, footprint: Footprint) -> None:
        self.at = footprint
        self.of: dict[int, _Gradient] = {}  # of each tensor, as far as it is summed up
        self.stored: set[int] = set()  # parameters that have a gradient

    def run(self) -> None:
        graph = self.at.graph
        self.of[graph.loss] = _Gradient(0.0, 1)
        for op in reversed(range(len(graph.ops))):
            if self.at._flows(op):
                self._operator(op)

    def _operator(self, op: int) -> None:
        at, graph = self.at, self.at.graph
        turn = at.backward[op]
        results = [self._result(op, t) for t in graph.ops[op].results if t in self.of]
        name = graph.ops[op].kind.rpartition(".")[2]
        for position, tensor in enumerate(graph.ops[op].inputs):
            if not graph.tensors[tensor].requires_grad:
                continue
            if graph.tensors[tensor].role == "parameter":
                self._parameter(op, position, turn)
                continue
            row = at.operand_row(op, position)
            size = at.facts.local_bytes(tensor, row, at.shape)
            handed = name in PASSED_ON and results and results[0].bytes == size
            gradient = results[0].shared() if handed else self._new(turn, size)
            gradient = self._moved(op, tensor, at.wiring.operands[op][position], gradient)
            if tensor in self.of:  # summed up in place
                self._release(gradient, turn)
            else:
                self.of[tensor] = gradient
        for gradient in results:
            self._release(gradient, turn)
        for extra in at.facts.extras[op]:
            if not extra.kept:
                size = at.extra_bytes(op, extra)
                _add(turn.takes, "buffers", size)
                _add(turn.gives, "buffers", size)

    def _result(self, op: int, tensor: int) -> _Gradient:
        """The gradient of a result, moved from the layout it is kept in for several readers."""
        gradient = self.of.pop(tensor)
        edge = self.at.wiring.kept.get(tensor)
        return gradient if edge is None else self._moved(op, tensor, edge, gradient, left=True)

    def _moved(
        self, op: int, tensor: int, edge: int | None, gradient: _Gradient, left: bool = False
    ) -> _Gradient:
        if edge is None or not self.at.assembly.moves(edge)[1]:
            return gradient
        at = self.at.assembly.tabulated.edges[edge]
        row = _row(at.left, self.at.assembly.choice[at.source])
        size = self.at.facts.local_bytes(tensor, row, self.at.shape)
        found = self._new(self.at.backward[op], size)
        self._release(gradient, self.at.backward[op])
        return found

    def _parameter(self, op: int, position: int, turn: Turn) -> None:
        """Its gradient in full where it is to be reduced, else the part that stays."""
        found = self.at.gathered[op][position]
        tensor = self.at.graph.ops[op].inputs[position]
        if found is None:
            return
        if tensor in self.stored:
            found.reduced = 0.0
        self.stored.add(tensor)
        if found.gradient:
            _add(turn.takes, "buffers", found.gradient)
        else:
            _add(turn.takes, "gradients", found.reduced)

    def _new(self, turn: Turn, size: float) -> _Gradient:
        _add(turn.takes, "buffers", size)
        return _Gradient(size, 1)

    def _release(self, gradient: _Gradient, turn: Turn) -> None:
        gradient.holders -= 1
        if not gradient.holders and gradient.bytes:
            _add(turn.gives, "buffers", gradient.bytes)


@dataclass(slots=True)
class _Gradient:
    bytes: float
    holders: int

    def shared(self) -> _Gradient:
        self.holders += 1
        return self


def scratch(step: Step) -> float:
    """Bytes that a collective needs beside what it leaves: parts are put together in a copy."""
    if not isinstance(step, Collective) or step.kind in ("all_reduce", "halo", "slice"):
        return 0.0
    if step.kind == "all_gather" and step.before is not None and step.after is not None:
        left = {int(b) for b, a in zip(step.before[0], step.after[0], strict=True) if b != a}
        if left == {0}:
            return 0.0  # parts of the outermost dim arrive in place
    return float(step.bytes[0])


def _add(into: Bytes, kind: str, size: float) -> None:
    if size:
        into[kind] = into.get(kind, 0.0) + size


def _row(layouts: Layouts, choice: int) -> Row:
    return tuple(layouts[choice].tolist())
