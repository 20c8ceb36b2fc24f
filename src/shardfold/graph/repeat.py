"""A run of periods of which a graph holds only a few: what stands for how many.

    operators:  before | period | period | period | after
                         `start`  each `length` operators, `traced` of them in the graph,
                                  standing for `count` in the model

All traced periods are alike: the same operators on their own tensors, on those of the period
before, and on tensors from before the run. Whatever holds for one period between two others
holds for every period that is left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardfold.graph.op import Op

if TYPE_CHECKING:
    from shardfold.graph.graph import Graph

MODEL = 1  # the traced period that missing ones are copies of: it stands between two others


@dataclass(frozen=True, slots=True)
class Repeat:
    """`count` periods in a row, `traced` of them in the graph from operator `start` on."""

    start: int
    length: int
    traced: int
    count: int
    paths: tuple[tuple[str, ...], ...]  # per period, the module paths of its blocks

    @property
    def end(self) -> int:
        """The operator after the last traced period."""
        return self.start + self.length * self.traced

    @property
    def missing(self) -> int:
        """How many periods the graph does not hold."""
        return self.count - self.traced

    def period_of(self, op: int) -> int | None:
        """The traced period that an operator belongs to."""
        return (op - self.start) // self.length if self.start <= op < self.end else None

    def ops(self, period: int) -> range:
        """The operators of a traced period."""
        first = self.start + period * self.length
        return range(first, first + self.length)

    def renamed(self, name: str, copy: int) -> str:
        """A name inside the model period's blocks, as it is in the copy-th missing period."""
        pairs = zip(self.paths[MODEL], self.paths[MODEL + 1 + copy], strict=True)
        for ours, theirs in pairs:
            if name == ours or name.startswith(f"{ours}."):
                return theirs + name[len(ours) :]
        return name

    def order(self) -> list[tuple[int, int | None]]:
        """All periods in execution order: the traced one, and which copy of it, if it is one.

        >>> Repeat(0, 1, 3, 5, ()).order()
        [(0, None), (1, None), (1, 0), (1, 1), (2, None)]
        """
        copies: list[tuple[int, int | None]] = [(MODEL, c) for c in range(self.missing)]
        traced: list[tuple[int, int | None]] = [(k, None) for k in range(self.traced)]
        return traced[: MODEL + 1] + copies + traced[MODEL + 1 :]


def are_alike(graph: Graph, repeat: Repeat) -> bool:
    """Whether all traced periods of a run do the same, each on what the one before left."""
    writer = {t: i for i, op in enumerate(graph.ops) for t in op.results}
    periods = [
        _relative(graph, repeat.start + k * repeat.length, repeat, writer)
        for k in range(repeat.traced)
    ]
    return periods[0] is not None and all(period == periods[0] for period in periods)


def _relative(graph: Graph, low: int, repeat: Repeat, writer: dict[int, int]) -> list[Any] | None:
    """A period's operators, tensors counted from its first operator."""
    found = []
    for op in graph.ops[low : low + repeat.length]:
        sources: list[Any] = []
        for operand in op.operands:
            tensor = graph.tensors[operand.tensor]
            source: Any = operand.tensor
            if tensor.role in ("parameter", "buffer"):
                source = (tensor.role, tensor.type, tensor.requires_grad, len(tensor.names))
            elif tensor.role == "activation":
                at = writer[operand.tensor]
                if repeat.start <= at < low - repeat.length:
                    return None
                position = graph.ops[at].results.index(operand.tensor)
                source = ("near", at - low, position) if at >= low - repeat.length else at
            sources.append((operand.name, source))
        results = [(graph.tensors[t].type, graph.tensors[t].requires_grad) for t in op.results]
        found.append((op.kind, sources, results, op.attributes))
    return found


def operator_order(graph: Graph) -> list[tuple[int, int, int | None]]:
    """Every operator of the model in execution order: (operator, repeat, copy).

    A repeat of -1 is an operator outside all runs; a copy of None one that is in the graph.
    """
    found: list[tuple[int, int, int | None]] = []
    at = 0
    for number, repeat in enumerate(graph.repeats):
        found += [(op, -1, None) for op in range(at, repeat.start)]
        for period, copy in repeat.order():
            found += [(op, number, copy) for op in repeat.ops(period)]
        at = repeat.end
    return found + [(op, -1, None) for op in range(at, len(graph.ops))]


def records(graph: Graph) -> list[str]:
    """What each operator of the model computes, from what: texts that are free of numbering.

    A tensor is named by its parameter's or input's name, or by the operator that wrote it.
    """
    order = operator_order(graph)
    place = {(op, copy): index for index, (op, _, copy) in enumerate(order)}
    writer = {t: (i, k) for i, op in enumerate(graph.ops) for k, t in enumerate(op.results)}
    local = [_local(graph, op) for op in graph.ops]
    found = []
    for op, number, copy in order:
        repeat = graph.repeats[number] if number >= 0 else None
        found.append(local[op])
        for tensor in graph.ops[op].inputs:
            if tensor in writer:
                at, position = writer[tensor]
                found.append(f"{place[_written(at, op, repeat, copy)]}.{position}")
            else:
                found.append(_given(graph, tensor, repeat, copy))
    return found


def _local(graph: Graph, op: Op) -> str:
    results = [_type(graph, t) for t in op.results]
    names = [operand.name for operand in op.operands]
    return json.dumps([op.kind, names, sorted(op.attributes.items()), results], default=str)


def _type(graph: Graph, tensor: int) -> list[Any]:
    found = graph.tensors[tensor]
    return [found.type.shape, found.type.dtype, found.requires_grad]


def _given(graph: Graph, tensor: int, repeat: Repeat | None, copy: int | None) -> str:
    """A parameter or input by name; a buffer, which no plan moves, by type alone."""
    found = graph.tensors[tensor]
    names: Sequence[str] = found.names if found.role != "buffer" else ()
    if repeat is not None and copy is not None:
        names = [repeat.renamed(name, copy) for name in names]
    return json.dumps([found.role, *names, *_type(graph, tensor)])


def _written(at: int, op: int, repeat: Repeat | None, copy: int | None) -> tuple[int, int | None]:
    """Which operator, or copy, wrote what operator `op` reads from operator `at`."""
    if repeat is None or not repeat.missing:
        return at, None
    ours, theirs = repeat.period_of(op), repeat.period_of(at)
    if theirs is None:
        return at, None
    if copy is not None:
        if theirs == MODEL:
            return at, copy
        return at + repeat.length, None if copy == 0 else copy - 1
    if ours == MODEL + 1 and theirs == MODEL:
        return at, repeat.missing - 1
    return at, None
