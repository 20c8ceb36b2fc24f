"""What memory depends on: sizes, views and kept tensors of a graph, and where a choice puts all."""

from __future__ import annotations

import numpy as np

from shardfold.costs.activations import extras, keeps_results, kept_operands
from shardfold.costs.memory_format import aliases
from shardfold.graph import Graph
from shardfold.operators import Extra
from shardfold.sharding import Subdims
from shardfold.sharding.layouts import Layouts, local_items
from shardfold.simulate.decoded import DecodedChoice

Row = tuple[int, ...]


class MemoryFacts:
    """What the memory of a graph depends on besides choices; made once for all of them."""

    def __init__(self, graph: Graph, subdims: Subdims) -> None:
        self.graph, self.subdims = graph, subdims
        self.aliases = aliases(graph, subdims)
        self.saved_operands = [kept_operands(graph, subdims, i) for i in range(len(graph.ops))]
        self.keeps_results = [keeps_results(graph, subdims, i) for i in range(len(graph.ops))]
        self.extras = [extras(graph, subdims, i) for i in range(len(graph.ops))]
        self.writer = {t: i for i, op in enumerate(graph.ops) for t in op.results}
        self.sizes: dict[object, float] = {}

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

    def operand_row(self, op: int, position: int) -> Row:
        """How an operator needs an operand to lie."""
        return self._row(self.wiring.sides.operand(op, position), op)

    def result_row(self, op: int, position: int) -> Row:
        """How an operator leaves a result."""
        return self._row(self.wiring.sides.result(op, position), op)

    def _row(self, layouts: Layouts, vertex: int) -> Row:
        return row_of(layouts, self.decoded.choice[vertex])

    def moves(self, edge: int | None, row: Row) -> bool:
        """Whether an operand has to be copied on its way: by steps, or sliced out of the whole."""
        if edge is None:
            return any(state >= 0 for state in row)
        return any(step.phase == "forward" for step in self.decoded.moved(edge))

    def stored_bytes(self, vertex: int) -> float:
        """Bytes of the part of a parameter that a device keeps."""
        chosen = self.decoded.tables.vertices[vertex]
        assert chosen.layouts is not None
        row = row_of(chosen.layouts, self.decoded.choice[vertex])
        return self.facts.local_bytes(chosen.index, row, self.shape)

    def extra_bytes(self, op: int, life: str) -> float:
        """Bytes of all that an operator makes beside its results, and that lives so long."""
        found = (e for e in self.facts.extras[op] if e.life == life)
        return sum(self._extra_bytes(op, extra) for extra in found if self._is_there(op, extra))

    def _is_there(self, op: int, extra: Extra) -> bool:
        return not extra.factor or self._splits(op, extra.factor) == extra.is_split

    def _splits(self, op: int, base: str) -> bool:
        """Whether an operator's configuration splits one of its factors."""
        space = self.wiring.sides.spaces[op]
        row = space.configs[self.decoded.choice[op]].tolist()
        return any(factor >= 0 and space.rule.base(factor) == base for factor in row)

    def _extra_bytes(self, op: int, extra: Extra) -> float:
        called = self.graph.ops[op]
        tensor = called.results[0] if extra.of < 0 else called.inputs[extra.of]
        row = self.result_row(op, 0) if extra.of < 0 else self.operand_row(op, extra.of)
        return self.facts.local_items(tensor, row, self.shape, extra.over) * extra.per_item


def row_of(layouts: Layouts, choice: int) -> Row:
    """One layout as a plain tuple."""
    return tuple(layouts[choice].tolist())
