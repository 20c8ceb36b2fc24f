"""Which operators of a block run again, for the splits of a choice: every best compromise.

Each operator of a block is kept or runs again. That is a small problem of its own, with two choices
an operator. Seconds: the forward of what runs again, with its collectives, and the moves of what is
made again to whoever reads it. Bytes: what is kept.

    a result that backward reads      kept, unless its operator runs again
    a result that only forward reads  kept if a reader runs again and its operator does not
    a copy that was moved to a reader kept, unless its writer or its reader runs again
    what is beside the results        kept, unless the operator runs again
    a view                            the memory that it is a view of

The sum of seconds and of bytes at a price is minimised exactly. The choices that are best at some
price are the *levels* of the block: the lower hull of all its compromises, from nothing that runs
again to the fewest bytes.

    bytes a block keeps  |o                      none
                         |  o                    norms and activation functions
                         |     ` o               and attention's rotations
                         |            ` ` o      everything
                         +----------------------- seconds more
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardfold.costs.activations import Blocks
from shardfold.search import Problem, solve
from shardfold.search.interning import Array
from shardfold.simulate.decoded import DecodedChoice
from shardfold.simulate.memory import LocalLayouts, MemoryFacts, row_of

DEAREST = 1e-6  # seconds for a byte: nobody pays more
SAME = 1e-9  # of a price: two compromises as good


@dataclass(frozen=True, slots=True)
class Level:
    """A compromise for one block: what runs again, the seconds it adds, the bytes it keeps."""

    again: frozenset[int]  # operators, counted from the block's first
    seconds: float = 0.0
    bytes: float = 0.0


def levels_of(
    decoded: DecodedChoice, facts: MemoryFacts, blocks: Blocks, block: range
) -> list[Level]:
    """The levels of a block under a choice that keeps everything, the fastest first."""
    return _hull(_BlockProblem(decoded, facts, blocks, block))


def _hull(problem: _BlockProblem) -> list[Level]:
    """The lower hull of all compromises: between two of them, the price at which they are equal."""
    first, last = problem.solve(0.0), problem.solve(DEAREST)
    return [first, *_between(problem, first, last)]


def _between(problem: _BlockProblem, left: Level, right: Level) -> Iterator[Level]:
    saved = left.bytes - right.bytes
    if saved <= 0:
        return
    price = (right.seconds - left.seconds) / saved
    found = problem.solve(price)
    worth = left.seconds + price * left.bytes
    if found.seconds + price * found.bytes < worth * (1 - SAME):
        yield from _between(problem, left, found)
        yield from _between(problem, found, right)
    else:
        yield right


@dataclass(slots=True)
class _Memory:
    """A piece of memory that a block reads: who makes it, reads it, and keeps it for backward."""

    bytes: float
    owner: int | None  # None: it comes from outside
    readers: set[int] = field(default_factory=set)
    is_kept: bool = False  # for somebody's backward, unless its owner runs again
    is_kept_outside: bool = False  # whatever runs again here


class _BlockProblem:
    """Kept (0) or again (1), for each operator of a block that is no view."""

    def __init__(
        self, decoded: DecodedChoice, facts: MemoryFacts, blocks: Blocks, block: range
    ) -> None:
        self.decoded, self.facts, self.blocks, self.block = decoded, facts, blocks, block
        self.at, self.graph = LocalLayouts(decoded, facts), decoded.graph
        self.memory: dict[int, _Memory] = {}  # of each tensor
        self.sizes: list[int] = []
        self.names: list[int] = []  # the operator of a vertex
        self.vertex: dict[int, int] = {}
        self.terms: tuple[list[Array], list[Array]] = ([], [])  # seconds, bytes
        self.pairs: dict[tuple[int, int], tuple[Array, Array]] = {}
        self.refused: list[tuple[int, int]] = []  # pairs of which not the second alone may be 1
        self._describe()
        self.most = [self._sum(what) for what in (0, 1)]

    def _sum(self, what: int) -> float:
        """More than any choice comes to."""
        arrays = (*self.terms[what], *(pair[what] for pair in self.pairs.values()))
        return sum(float(np.abs(each).sum()) for each in arrays)

    def solve(self, price: float) -> Level:
        """The least seconds with bytes at a price."""
        fence = np.array([[0.0, 2 * (self.most[0] + price * self.most[1])], [0.0, 0.0]])
        problem = Problem(
            tuple(s + price * b for s, b in zip(*self.terms, strict=True)),
            (*self.pairs, *self.refused),
            (*(s + price * b for s, b in self.pairs.values()), *[fence] * len(self.refused)),
        )
        choice = solve(problem).choice
        seconds, size = (self._total(what, choice) for what in (0, 1))
        again = {op - self.block.start for op, v in self.vertex.items() if choice[v]}
        return Level(frozenset(again), seconds, size)

    def _total(self, what: int, choice: Sequence[int]) -> float:
        own = sum(float(t[choice[v]]) for v, t in enumerate(self.terms[what]))
        return own + sum(float(p[what][choice[a], choice[b]]) for (a, b), p in self.pairs.items())

    # The terms

    def _describe(self) -> None:
        for op in self.block:
            if not self._is_view(op):
                self.vertex[op] = self._new(2 if self.blocks.may_run_again(op) else 1)
        for op in self.block:
            self._operands(op)
            self._results(op)
        for memory in {id(m): m for m in self.memory.values()}.values():
            self._kept(memory)
        for op in self.vertex:
            if self.blocks.is_view(op):
                self._follow(op)

    def _follow(self, op: int) -> None:
        """A view that is moved runs again with what it is a view of, and with its readers."""
        source = self._memory_of(self.graph.ops[op].inputs[0])
        near = set(self.memory[self.graph.ops[op].results[0]].readers)
        if source is not None and source.owner is not None:
            near.add(source.owner)
        others = [self.vertex[each] for each in near]
        self.refused += [(self.vertex[op], v) for v in others if self.sizes[v] == 2]

    def _new(self, size: int) -> int:
        self.sizes.append(size)
        for terms in self.terms:
            terms.append(np.zeros(size))
        return len(self.sizes) - 1

    def _is_view(self, op: int) -> bool:
        """Whether the operator does nothing but look at memory that is there."""
        return self.blocks.is_view(op) and not self._is_moved(op, 0)

    def _is_moved(self, op: int, operand: int) -> bool:
        edge = self.at.wiring.operand_edge[op][operand]
        return self.at.moves(edge, self.at.operand_row(op, operand))

    def _operands(self, op: int) -> None:
        kept = self.facts.saved_operands[op]
        for operand, tensor in enumerate(self.graph.ops[op].inputs):
            role = self.graph.tensors[tensor].role
            edge = self.at.wiring.operand_edge[op][operand]
            if role == "parameter":
                self._parameter(op, operand, edge)
                continue
            memory = self._memory_of(tensor)
            if op not in self.vertex:
                continue  # a view: its readers are the memory's
            if memory is not None:
                memory.readers.add(op)
            if not self._is_moved(op, operand):
                if memory is not None and operand in kept:
                    memory.is_kept = True
                continue
            seconds = self._forward(edge)
            self._again(op, seconds)
            if operand in kept:
                row = self.at.operand_row(op, operand)
                size = self.facts.local_bytes(tensor, row, self.at.shape)
                self._copy(op, None if memory is None else memory.owner, size, seconds)

    def _copy(self, op: int, owner: int | None, size: float, seconds: float) -> None:
        """A moved operand that backward reads: kept, or moved again from what is made again."""
        if owner is None or owner not in self.vertex:
            self.terms[1][self.vertex[op]][0] += size
            return
        table = self._pair(owner, op)
        table[1][0, 0] += size
        if table[0].shape[0] == 2:
            table[0][1, 0] += seconds

    def _pair(self, first: int, second: int) -> tuple[Array, Array]:
        return self._pair_of(self.vertex[first], self.vertex[second])

    def _pair_of(self, first: int, second: int) -> tuple[Array, Array]:
        shape = (self.sizes[first], self.sizes[second])
        return self.pairs.setdefault((first, second), (np.zeros(shape), np.zeros(shape)))

    def _parameter(self, op: int, operand: int, edge: int | None) -> None:
        """Gathered once more, unless it is anyhow for backward."""
        if edge is None or op not in self.vertex:
            return
        at, choice = self.decoded.tables.edges[edge], self.decoded.choice
        assert at.regathers is not None
        if not at.regathers[choice[at.source]]:
            self._again(op, self._forward(edge))

    def _again(self, op: int, seconds: float) -> None:
        if self.sizes[self.vertex[op]] == 2:
            self.terms[0][self.vertex[op]][1] += seconds

    def _forward(self, edge: int | None) -> float:
        """Seconds of what an edge moves forward."""
        if edge is None:
            return 0.0
        steps = self.decoded.moves(edge)[0]
        return sum(self.decoded.total(s) for s in steps if s.phase == "forward")

    def _results(self, op: int) -> None:
        results = self.graph.ops[op].results
        if op not in self.vertex:
            memory = self._memory_of(self.graph.ops[op].inputs[0])
            if memory is not None:
                for tensor in results:
                    self._read_elsewhere(memory, tensor)
                self.memory |= dict.fromkeys(results, memory)
            return
        steps = self.decoded.work(op)
        self._again(op, sum(self.decoded.total(s) for s in steps if s.phase == "forward"))
        self.terms[1][self.vertex[op]][0] += self.at.extra_bytes(op, "kept")
        for position, tensor in enumerate(results):
            row, edge = self.at.result_row(op, position), self.at.wiring.shared_edge.get(tensor)
            if edge is not None:
                self._again(op, self._forward(edge))
                at = self.decoded.tables.edges[edge]
                row = row_of(at.needed, self.decoded.choice[at.target])
            size = self.facts.local_bytes(tensor, row, self.at.shape)
            memory = self.memory[tensor] = _Memory(size, op)
            memory.is_kept = self.facts.keeps_results[op]
            self._read_elsewhere(memory, tensor)

    def _read_elsewhere(self, memory: _Memory, tensor: int) -> None:
        """Note whether an operator of another block keeps it."""
        for reader, operand in self.blocks.readers.get(tensor, ()):
            saves = operand in self.facts.saved_operands[reader]
            if reader not in self.block and (saves or self.blocks.is_view(reader)):
                memory.is_kept_outside = True

    def _memory_of(self, tensor: int) -> _Memory | None:
        """What comes from outside is there anyway, or has to be kept for what runs again."""
        if tensor in self.memory or self.graph.tensors[tensor].role != "activation":
            return self.memory.get(tensor)
        found = _Memory(self.at.crossing_bytes(tensor), None)
        found.is_kept_outside = self.facts.keeps_results[self.facts.writer[tensor]]
        self._read_elsewhere(found, tensor)
        self.memory[tensor] = found
        return found

    def _kept(self, memory: _Memory) -> None:
        """What a piece of memory adds."""
        if memory.is_kept_outside or (memory.owner is None and memory.is_kept):
            return
        owner = None if memory.owner is None else self.vertex[memory.owner]
        if owner is not None and memory.is_kept:
            self.terms[1][owner][0] += memory.bytes
            return
        readers = [self.vertex[r] for r in memory.readers if self.sizes[self.vertex[r]] == 2]
        if not readers:
            return
        wanted = readers[0] if len(readers) == 1 else self._any_of(readers)
        if owner is None:
            self.terms[1][wanted][1] += memory.bytes
        else:
            self._pair_of(owner, wanted)[1][0, 1] += memory.bytes

    def _any_of(self, readers: Sequence[int]) -> int:
        """A vertex that is 1 if a reader is."""
        found = self._new(2)
        self.refused += [(found, reader) for reader in readers]
        return found
