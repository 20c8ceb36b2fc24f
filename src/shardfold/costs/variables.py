"""What there is to decide about a graph: the vertices of the search problem, without prices.

A decision is the configuration of an operator, the layout that several readers of a tensor share,
or the storage of a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardfold.costs.parameters import Storage
from shardfold.graph import Graph
from shardfold.sharding import Space
from shardfold.sharding.layouts import Layouts

Place = tuple[int, int]  # an operator, and the position of a tensor among its operands or results


@dataclass(frozen=True, slots=True)
class Vertex:
    """A decision: an operator's configuration, a tensor's layout, or a parameter's storage."""

    what: Literal["op", "tensor", "parameter"]
    index: int  # of the operator or the tensor in the graph
    space: Space | None = None
    layouts: Layouts | None = None
    storage: Storage | None = None


class Sides:
    """The layouts that configurations imply, one object for all operators that agree on them."""

    def __init__(self, spaces: Sequence[Space]) -> None:
        self.spaces = spaces
        self._known: dict[object, Layouts] = {}

    def operand(self, op: int, position: int) -> Layouts:
        """How each configuration of an operator needs an operand to lie."""
        return self._layouts("operand", op, position)

    def result(self, op: int, position: int) -> Layouts:
        """How each configuration of an operator leaves a result."""
        return self._layouts("result", op, position)

    def _layouts(self, side: str, op: int, position: int) -> Layouts:
        space = self.spaces[op]
        key = (side, position, id(space))
        if key not in self._known:
            take = space.result_layouts if side == "result" else space.operand_layouts
            found = take(position)
            self._known[key] = self._known.setdefault((found.shape, found.tobytes()), found)
        return self._known[key]


def gradient_readers(graph: Graph, tensor: int, readers: Sequence[Place]) -> list[Place]:
    """The readers of a tensor from which a gradient comes back, in forward order."""
    if not graph.tensors[tensor].requires_grad:
        return []
    return [reader for reader in readers if graph.has_gradient(reader[0])]


def shared_tensors(graph: Graph) -> list[int]:
    """The tensors whose layout is a decision of its own: several readers, or the loss."""
    constant, readers = constant_tensors(graph), graph.readers()
    return [
        index
        for index, tensor in enumerate(graph.tensors)
        if tensor.role == "activation"
        and index not in constant
        and (index == graph.loss or len(readers.get(index, ())) > 1)
    ]


def constant_tensors(graph: Graph) -> set[int]:
    """Tensors that depend on no parameter: masks, positions, rotary tables, shifted labels.

    They carry no gradient and every device can make them from what it already has, so they are
    computed whole everywhere and sliced for free.
    """
    found: set[int] = set()
    for op in graph.ops:
        if all(graph.tensors[t].role in ("input", "buffer") or t in found for t in op.inputs):
            found.update(op.results)
    return found
