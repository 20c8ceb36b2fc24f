"""What memory depends on: sizes, views and kept tensors of a graph, and where a choice puts all."""

from __future__ import annotations

from collections import defaultdict

from shardfold.costs import Tabulated
from shardfold.costs.memory_format import aliases
from shardfold.costs.saved import Extra, extras, keeps_results, kept_operands
from shardfold.graph import Graph
from shardfold.sharding import Space, Subdims
from shardfold.sharding.layouts import Layouts
from shardfold.simulate.decoded import Assembly

Row = tuple[int, ...]


class Facts:
    """What the memory of a graph depends on besides choices; made once for all of them."""

    def __init__(self, graph: Graph, subdims: Subdims) -> None:
        self.graph, self.subdims = graph, subdims
        self.aliases = aliases(graph)
        self.kept = [kept_operands(graph, subdims, i) for i in range(len(graph.ops))]
        self.keeps_results = [keeps_results(graph, subdims, i) for i in range(len(graph.ops))]
        self.extras = [extras(graph, i) for i in range(len(graph.ops))]
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
            parts = [1] * len(subdims)
            for state, size in zip(row, shape, strict=True):
                if state >= 0:
                    parts[state] *= size
            last = len(self.graph.tensors[tensor].type.shape) - over
            items = 1
            for dim, size, n in zip(self.subdims.dims[tensor], subdims, parts, strict=True):
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


class Lying:
    """Where everything lies under one choice: operands, results, stored parameters."""

    def __init__(self, assembly: Assembly, facts: Facts, wiring: Wiring) -> None:
        self.assembly, self.facts, self.wiring = assembly, facts, wiring
        self.graph, self.regions = assembly.graph, assembly.tabulated.regions
        self.shape: Row = tuple(assembly.tabulated.mesh.shape)

    def operand_row(self, op: int, position: int) -> Row:
        """How an operator needs an operand to lie."""
        edge = self.wiring.operands[op][position]
        if edge is not None:
            at = self.assembly.tabulated.edges[edge]
            return row_of(at.needed, self.assembly.choice[at.target])
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
            rows[key] = row_of(take(position), 0)
        return rows[key]

    def moves(self, edge: int | None, row: Row) -> bool:
        """Whether an operand has to be copied on its way: by steps, or sliced out of the whole."""
        if edge is None:
            return any(state >= 0 for state in row)
        return any(step.phase == "forward" for step in self.assembly.moved(edge))

    def stored_bytes(self, vertex: int) -> float:
        """Bytes of the part of a parameter that a device keeps."""
        chosen = self.assembly.tabulated.vertices[vertex]
        assert chosen.layouts is not None
        row = row_of(chosen.layouts, self.assembly.choice[vertex])
        return self.facts.local_bytes(chosen.index, row, self.shape)

    def extra_bytes(self, op: int, life: str) -> float:
        """Bytes of all that an operator makes beside its results, and that lives so long."""
        found = (e for e in self.facts.extras[op] if e.life == life)
        return sum(self._extra_bytes(op, extra) for extra in found if self._is_there(op, extra))

    def _is_there(self, op: int, extra: Extra) -> bool:
        return not extra.factor or self._splits(op, extra.factor) == extra.is_split

    def _splits(self, op: int, base: str) -> bool:
        """Whether an operator's configuration splits one of its factors."""
        vertex = self.wiring.vertex[op]
        space = self.assembly.tabulated.vertices[vertex].space
        assert space is not None
        row = space.configs[self.assembly.choice[vertex]].tolist()
        return any(factor >= 0 and space.rule.base(factor) == base for factor in row)

    def _extra_bytes(self, op: int, extra: Extra) -> float:
        called = self.graph.ops[op]
        tensor = called.results[0] if extra.of < 0 else called.inputs[extra.of]
        row = self.result_row(op, 0) if extra.of < 0 else self.operand_row(op, extra.of)
        return self.facts.local_items(tensor, row, self.shape, extra.over) * extra.per_item

    def flows(self, op: int) -> bool:
        """Whether a gradient comes back to an operator."""
        return any(self.graph.tensors[t].requires_grad for t in self.graph.ops[op].results)


def row_of(layouts: Layouts, choice: int) -> Row:
    """One layout as a plain tuple."""
    return tuple(layouts[choice].tolist())
