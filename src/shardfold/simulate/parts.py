"""A part of a model: the stretch of operators that one stage of a pipeline runs.

What crosses into a part is received, in the layout that its writer left it in; what crosses out of
it is sent. What depends on no parameter (masks, rotary tables, shifted labels) does not cross: a
part makes it for itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardfold.costs.decision_graph import constant_tensors
from shardfold.graph import Graph


@dataclass(frozen=True, slots=True)
class Part:
    """Operators of a graph in a row, and how many periods of each of its runs they stand for."""

    ops: range
    periods: tuple[int, ...] = ()

    @classmethod
    def whole(cls, graph: Graph) -> Part:
        """All of it."""
        return cls(range(len(graph.ops)), tuple(repeat.count for repeat in graph.repeats))

    def makes_again(self, graph: Graph) -> list[int]:
        """Operators before it whose results it reads and makes for itself."""
        if not self.ops.start:
            return []
        constant, writers = constant_tensors(graph), graph.writers()
        found: set[int] = set()
        asked = [t for op in self.ops for t in graph.ops[op].inputs if t in constant]
        while asked:
            op, _ = writers[asked.pop()]
            if op < self.ops.start and op not in found:
                found.add(op)
                asked += [t for t in graph.ops[op].inputs if t in constant]
        return sorted(found)

    def received(self, graph: Graph) -> list[int]:
        """Tensors that come from operators before it: to be read here, or after it."""
        return _crossing(graph, self.ops.start)

    def sent(self, graph: Graph) -> list[int]:
        """Tensors that operators after it read."""
        return _crossing(graph, self.ops.stop)


def _crossing(graph: Graph, cut: int) -> list[int]:
    """The tensors that are written before an operator and read from it on."""
    if cut in (0, len(graph.ops)):
        return []
    constant, readers = constant_tensors(graph), graph.readers()
    return [
        tensor
        for tensor, (op, _) in graph.writers().items()
        if op < cut and tensor not in constant and any(r >= cut for r, _ in readers.get(tensor, ()))
    ]
