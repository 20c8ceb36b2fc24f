"""What there is to decide about a graph, and what moves between the decisions.

The decisions are the vertices of the search problem, without prices. A decision is the
configuration of an operator, the layout that several readers of a tensor share, or the storage of a
parameter.

Every edge is described once: which decisions it joins, and what moves along it. Tables price these
edges, the simulator and a plan read their steps, and the runner lowers them.

    activation with one reader      writer -> reader
    activation with several, loss   writer -> layout that they share -> each reader
    parameter                       storage -> each reader
    input, buffer, constant         no edge: whole on every device, sliced for free
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardfold.costs.activations import KEEP_ALL, Regions
from shardfold.costs.parameters import Storage
from shardfold.costs.priced import PricedOperator
from shardfold.costs.reshard import reshard
from shardfold.costs.steps import Compute, Phase, Step, Steps, Values, defer
from shardfold.graph import Graph
from shardfold.graph.graph import ITEM_BYTES
from shardfold.sharding import Space, Subdims
from shardfold.sharding.layouts import Layouts, forward_states, gradient_states, local_items

Place = tuple[int, int]  # an operator, and the position of a tensor among its operands or results


@dataclass(frozen=True, slots=True)
class Vertex:
    """A decision: an operator's configuration, a tensor's layout, or a parameter's storage."""

    what: Literal["op", "tensor", "parameter"]
    index: int  # of the operator or the tensor in the graph
    space: Space | None = None
    layouts: Layouts | None = None
    storage: Storage | None = None
    priced: PricedOperator | None = None  # in tables


class Sides:
    """The layouts that configurations imply, one object for all operators that agree on them."""

    def __init__(self, spaces: Sequence[Space], known: dict[object, Layouts] | None = None) -> None:
        self.spaces = spaces
        self._known = {} if known is None else known  # kept beside the spaces of a mesh

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


@dataclass(frozen=True, slots=True)
class Leg:
    """One reshard on an edge, for each of its layouts on either side.

    A value goes from what is left to what is needed, its gradient the other way. A sum is the
    gradient that several readers of a parameter have added to, on its way to where it is stored.
    """

    what: Literal["value", "gradient", "sum"]
    phase: Phase
    source: Layouts
    target: Layouts
    only: NDArray[np.bool_] | None = None  # of what is left: the layouts from which it is made
    may_defer: bool = False  # for the last micro-batch


@dataclass(frozen=True, slots=True)
class Cast:
    """The dtypes of a parameter that is kept in another one than it is used in."""

    kept: str
    used: str
    sent: str  # of its gradient, on its way


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor that goes from one decision to another: what one leaves, what the other needs.

    `left` has a layout for each choice of the source, `needed` for each choice of the target.
    """

    tensor: int
    source: int
    target: int
    left: Layouts
    needed: Layouts
    subdims: tuple[int, ...]
    item_bytes: int
    has_gradient: bool  # one comes back from the target
    is_recomputed: bool  # moved once more, where the operator that moves it runs again
    storage: Storage | None = None  # of a parameter
    is_used_backward: bool = False  # of a parameter: its reader needs it again in backward
    reduces_sum: bool = False  # of a parameter: its gradient comes last, and the sum goes on
    cast: Cast | None = None  # of a parameter with master weights

    @property
    def regathers(self) -> NDArray[np.bool_] | None:
        """Of a parameter: the storages from which it is gathered again in backward."""
        return None if self.storage is None else self.storage.regathers & self.is_used_backward

    def at(self, source: int, target: int) -> Edge:
        """The edge under one choice of either side."""
        left, needed = self.left[source : source + 1], self.needed[target : target + 1]
        storage = None if self.storage is None else self.storage.at(source)
        return replace(self, left=left, needed=needed, storage=storage)

    def legs(self, micro_batches: int = 1) -> tuple[Leg, ...]:
        """All that travels on the edge, in order; in a step of so many passes, one pass's."""
        values = (forward_states(self.left), forward_states(self.needed))
        found = [Leg("value", "forward", *values)]
        regathers = self.regathers
        if self.is_recomputed:  # what is gathered then serves backward, too
            found.append(Leg("value", "recompute", *values))
        elif regathers is not None and regathers.any():
            found.append(Leg("value", "backward", *values, only=regathers))
        if self.has_gradient:
            gradients = (gradient_states(self.needed), gradient_states(self.left))
            may_defer = self.storage is not None and micro_batches > 1
            found.append(Leg("gradient", "backward", *gradients, may_defer=may_defer))
        if self.has_gradient and self.reduces_sum:
            summed = (gradient_states(self.left), forward_states(self.left))
            found.append(Leg("sum", "backward", *summed, may_defer=True))
        return tuple(found)

    def steps(self, leg: Leg, shape: Sequence[int]) -> Steps:
        """The steps of one leg under one choice of either side."""
        layouts = (leg.source, leg.target)
        found = reshard(*layouts, shape, self.subdims, self.sent_bytes(leg), leg.phase)
        return defer(found) if leg.may_defer else found

    def sent_bytes(self, leg: Leg) -> int:
        """Of one item, as it is sent."""
        is_gradient = self.cast is not None and leg.what != "value"
        return ITEM_BYTES[self.cast.sent] if self.cast and is_gradient else self.item_bytes

    def casts(self, leg: Leg, shape: Sequence[int]) -> tuple[Compute | None, Compute | None]:
        """What is cast before a leg's steps, for each of its sources, and after, for each target.

        A device casts the part of a parameter that it keeps, and of a gradient whatever is reduced
        in a longer dtype, or the part that stays.
        """
        if self.cast is None or leg.what == "sum":
            return None, None
        if leg.what == "value":
            return self._cast(leg, leg.source, self.cast.kept, self.cast.used, shape), None
        before = self._cast(leg, leg.source, self.cast.used, self.cast.sent, shape)
        return before, self._cast(leg, leg.target, self.cast.sent, self.cast.kept, shape)

    def _cast(
        self, leg: Leg, layouts: Layouts, before: str, after: str, shape: Sequence[int]
    ) -> Compute | None:
        if before == after:
            return None
        items: Values = local_items(forward_states(layouts), self.subdims, shape)
        moved = items * (ITEM_BYTES[before] + ITEM_BYTES[after])
        return Compute(leg.phase, "cast", before, np.zeros(len(items)), moved)

    def moved(self, leg: Leg, shape: Sequence[int]) -> list[Step]:
        """All that one leg does under one choice of either side, casts included."""
        before, after = self.casts(leg, shape)
        steps: list[Step] = self.steps(leg, shape).case(0)
        return [*filter(None, [before]), *steps, *filter(None, [after])]


@dataclass(frozen=True, slots=True)
class Wiring:
    """The decisions of a graph, and the edges that join them; operator i is vertex i."""

    vertices: tuple[Vertex, ...]
    edges: tuple[Edge, ...]
    sides: Sides
    operand_edge: tuple[tuple[int | None, ...], ...]  # of each operator: None where there is none
    shared_edge: dict[int, int]  # tensor: the edge into the layout that its readers share
    storage_vertex: dict[int, int]  # parameter: the vertex that decides on its storage


def wire(
    graph: Graph,
    subdims: Subdims,
    vertices: Sequence[Vertex],
    sides: Sides,
    regions: Regions = KEEP_ALL,
) -> Wiring:
    """The edges between the decisions of a graph, in the order of its tensors.

    The vertices are the operators in their order, then the shared tensors and parameters.
    """
    return _Wirer(graph, subdims, vertices, sides, regions).run()


class _Wirer:
    def __init__(
        self,
        graph: Graph,
        subdims: Subdims,
        vertices: Sequence[Vertex],
        sides: Sides,
        regions: Regions,
    ) -> None:
        self.graph, self.subdims, self.vertices = graph, subdims, vertices
        self.sides, self.regions = sides, regions
        decided = list(enumerate(vertices))[len(graph.ops) :]
        self.vertex_of = {vertex.index: v for v, vertex in decided}  # of a tensor
        self.edges: list[Edge] = []
        self.operands: list[list[int | None]] = [[None] * len(op.inputs) for op in graph.ops]
        self.shared: dict[int, int] = {}

    def run(self) -> Wiring:
        readers, writers = self.graph.readers(), self.graph.writers()
        constant = constant_tensors(self.graph)
        for tensor, described in enumerate(self.graph.tensors):
            read_by = readers.get(tensor, [])
            if described.role == "parameter" and read_by:
                self._parameter(tensor, read_by)
            elif described.role == "activation" and tensor not in constant:
                self._activation(tensor, writers[tensor], read_by)
        return Wiring(
            tuple(self.vertices),
            tuple(self.edges),
            self.sides,
            tuple(map(tuple, self.operands)),
            self.shared,
            {x.index: v for v, x in enumerate(self.vertices) if x.storage is not None},
        )

    def _activation(self, tensor: int, writer: Place, readers: list[Place]) -> None:
        source, left = writer[0], self.sides.result(*writer)
        if tensor in self.vertex_of:
            shared = self.vertices[self.vertex_of[tensor]].layouts
            assert shared is not None
            ends, again = (source, self.vertex_of[tensor]), self.regions.runs_again(source)
            self.shared[tensor] = len(self.edges)
            self.edges.append(self._edge(tensor, *ends, left, shared, is_recomputed=again))
            source, left = self.vertex_of[tensor], shared
        for reader in readers:
            self._read(reader, self._into(reader, tensor, source, left))

    def _parameter(self, tensor: int, readers: list[Place]) -> None:
        vertex = self.vertex_of[tensor]
        storage = self.vertices[vertex].storage
        assert storage is not None
        # Backward meets the first reader last: its edge takes the sum of all to where it is stored.
        last = next(iter(gradient_readers(self.graph, tensor, readers)), None)
        for reader in readers:
            edge = replace(
                self._into(reader, tensor, vertex, storage.layouts),
                storage=storage,
                is_used_backward=self._is_used_backward(*reader),
                reduces_sum=storage.has_sums and reader == last,
            )
            self._read(reader, edge)

    def _is_used_backward(self, op: int, operand: int) -> bool:
        """Backward gathers again only what it needs: a bias or an embedding's table is not."""
        gradients = [self.graph.tensors[t].requires_grad for t in self.graph.ops[op].inputs]
        needs = self.subdims.rules[op].rule.needs_again(operand, gradients)
        return needs and self.graph.has_gradient(op)

    def _read(self, reader: Place, edge: Edge) -> None:
        op, operand = reader
        self.operands[op][operand] = len(self.edges)
        self.edges.append(edge)

    def _into(self, reader: Place, tensor: int, source: int, left: Layouts) -> Edge:
        """The edge to an operand of an operator."""
        edge = self._edge(
            tensor,
            source,
            reader[0],
            left,
            self.sides.operand(*reader),
            is_recomputed=self.regions.brings_again(*reader),
        )
        flows = self.graph.has_gradient(reader[0])
        return edge if flows else replace(edge, has_gradient=False)

    def _edge(
        self,
        tensor: int,
        source: int,
        target: int,
        left: Layouts,
        needed: Layouts,
        *,
        is_recomputed: bool,
    ) -> Edge:
        described, subdims = self.graph.tensors[tensor], self.subdims.tensors[tensor]
        kind, trained = described.type, described.requires_grad
        edge = Edge(
            tensor, source, target, left, needed, subdims, kind.item_bytes, trained, is_recomputed
        )
        if described.role != "parameter" or not self.graph.is_cast(tensor):
            return edge
        kept = self.graph.precision
        return replace(edge, cast=Cast(kept.kept(kind), kind.dtype, kept.sent(kind)))
