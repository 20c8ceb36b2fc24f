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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardfold.graph.graph import Graph, Op

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


def readings(graph: Graph) -> Counter[int]:
    """How often the model reads each tensor: one from before a run in the missing periods, too."""
    found = Counter(tensor for op in graph.ops for tensor in op.inputs)
    writer = {t: i for i, op in enumerate(graph.ops) for t in op.results}
    for repeat in graph.repeats:
        for op in repeat.ops(MODEL) if repeat.missing else ():
            for tensor in graph.ops[op].inputs:
                if writer.get(tensor, repeat.start) < repeat.start:
                    found[tensor] += repeat.missing
    return found


def places(graph: Graph) -> list[int]:
    """Of each operator of the graph its place among the model's; copies follow the model period."""
    found = list(range(len(graph.ops)))
    for repeat in graph.repeats:
        moved = repeat.missing * repeat.length
        for op in range(repeat.ops(MODEL).stop, len(graph.ops)):
            found[op] += moved
    return found


def records(graph: Graph) -> list[str]:
    """What each operator of the model computes, from what: texts that are free of numbering.

    A tensor is named by its parameter's or input's name, or by the operator that wrote it.
    Copies of a period differ in the names and in the numbers of operators alone: their texts are
    put together from the same parts.
    """
    place = places(graph)
    writer = {t: (i, k) for i, op in enumerate(graph.ops) for k, t in enumerate(op.results)}
    local = [_local(graph, op) for op in graph.ops]
    copied = {repeat.ops(MODEL)[-1]: repeat for repeat in graph.repeats}
    inside = {op: repeat for repeat in graph.repeats for op in repeat.ops(MODEL + 1)}
    found = []
    for index, op in enumerate(graph.ops):
        found.append(local[index])
        for tensor in op.inputs:
            if tensor in writer:
                at, position = writer[tensor]
                repeat = inside.get(index)
                # What follows the copies reads the last of them.
                last = repeat is not None and repeat.period_of(at) == MODEL
                found.append(f"{place[at] + (_moved(repeat) if last else 0)}.{position}")
            else:
                found.append(_given(graph, tensor))
        if index in copied:
            found += _copies(graph, copied[index], place, writer, local)
    return found


def _moved(repeat: Repeat | None) -> int:
    return 0 if repeat is None else repeat.missing * repeat.length


Part = str | int | tuple[int, str]  # as it is; a place in the first copy; a block and what follows


def _copies(
    graph: Graph,
    repeat: Repeat,
    place: list[int],
    writer: dict[int, tuple[int, int]],
    local: list[str],
) -> list[str]:
    """The records of each missing period as one text."""
    parts: list[Part] = []
    for index in repeat.ops(MODEL):
        parts += ["\n", local[index]]
        for tensor in graph.ops[index].inputs:
            parts.append("\n")
            if tensor not in writer:
                parts += _named_parts(_given(graph, tensor), repeat.paths[MODEL])
                continue
            at, position = writer[tensor]
            near = repeat.period_of(at) is not None
            parts += [place[at] + repeat.length if near else str(place[at]), f".{position}"]
    merged = _merged(parts[1:])
    return [
        "".join(
            part
            if isinstance(part, str)
            else str(part + copy * repeat.length)
            if isinstance(part, int)
            else _quoted(repeat.paths[MODEL + 1 + copy][part[0]]) + part[1]
            for part in merged
        )
        for copy in range(repeat.missing)
    ]


def _merged(parts: Sequence[Part]) -> list[Part]:
    """The parts with neighbouring texts joined."""
    found: list[Part] = []
    for part in parts:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


def _named_parts(text: str, paths: Sequence[str]) -> list[Part]:
    """A parameter's text, cut where a block's path stands in a name."""
    for block, path in enumerate(paths):
        for begin in (f'"{_quoted(path)}.', f'"{_quoted(path)}"'):
            if begin in text:
                before, _, after = text.partition(begin)
                return [f'{before}"', (block, begin[-1]), *_named_parts(after, paths)]
    return [text]


def _quoted(name: str) -> str:
    """A name as it stands in JSON."""
    return json.dumps(name)[1:-1]


def _local(graph: Graph, op: Op) -> str:
    results = [_type(graph, t) for t in op.results]
    names = [operand.name for operand in op.operands]
    return json.dumps([op.kind, names, sorted(op.attributes.items()), results], default=str)


def _type(graph: Graph, tensor: int) -> list[Any]:
    found = graph.tensors[tensor]
    return [found.type.shape, found.type.dtype, found.requires_grad]


def _given(graph: Graph, tensor: int) -> str:
    """A parameter or input by name; a buffer, which no plan moves, by type alone."""
    found = graph.tensors[tensor]
    names: Sequence[str] = found.names if found.role != "buffer" else ()
    return json.dumps([found.role, *names, *_type(graph, tensor)])
