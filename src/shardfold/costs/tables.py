"""From a graph on a mesh to a search problem: one vertex a decision, one table a distinct pair.

A vertex costs its own steps, an edge the reshards between two decisions, forward and backward.
Equal operators share one table object and equal edges another, so a table is priced once however
deep the model is, and the search can fold what is shared.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardfold.cluster import Mesh
from shardfold.costs.edges import EdgePrices
from shardfold.costs.model import CostModel, price, sums_gradients
from shardfold.costs.operator_steps import Tensors, operator_steps
from shardfold.costs.parameters import Optimizer, storages, sum_up_steps, summed_axes, update_steps
from shardfold.costs.recompute import KEEP_ALL, Regions
from shardfold.costs.saved import Saved, saved_bytes
from shardfold.costs.steps import Values
from shardfold.costs.variables import Edge, Tabulated, Vertex, constant_tensors
from shardfold.graph import Graph
from shardfold.search import Problem
from shardfold.sharding import Space, Subdims, space_of
from shardfold.sharding.configs import is_legal_split
from shardfold.sharding.layouts import (
    PENDING,
    REPLICATED,
    SHARED,
    Layouts,
    forward_states,
    local_items,
    split_counts,
)

Place = tuple[int, int]  # a vertex, and the position of a tensor among its operands or results


def tabulate(
    graph: Graph,
    subdims: Subdims,
    mesh: Mesh,
    model: CostModel,
    optimizer: Optimizer,
    regions: Regions = KEEP_ALL,
    prices: EdgePrices | None = None,
    passes: int = 1,
) -> Tabulated:
    """Price every choice of every decision of `graph` on `mesh`; `regions` are recomputed.

    `prices` of the same mesh, model and number of passes, where there are any, are used and added
    to. The graph is that of one pass; seconds are of a step, which takes so many.
    """
    prices = EdgePrices(mesh, model, passes) if prices is None else prices
    assert prices.passes == passes
    return _Tabulator(graph, subdims, mesh, model, optimizer, regions, prices).run()


class _Tabulator:
    """Collects vertices and edges; every priced table is cached by what it depends on."""

    def __init__(
        self,
        graph: Graph,
        subdims: Subdims,
        mesh: Mesh,
        model: CostModel,
        optimizer: Optimizer,
        regions: Regions,
        prices: EdgePrices,
    ) -> None:
        self.graph, self.subdims, self.mesh = graph, subdims, mesh
        self.model, self.optimizer, self.regions = model, optimizer, regions
        self.saved = Saved(graph, subdims, regions)
        self.prices, self.passes = prices, prices.passes
        self.constant = constant_tensors(graph)
        self.sums = sums_gradients(model)
        self.vertices: list[Vertex] = []
        self.costs: list[Values] = []
        self.bytes: list[Values] = []
        self.edges: list[Edge] = []
        self.edge_costs: list[Values] = []
        self.edge_bytes: list[Values] = []
        self.cache: dict[Any, Any] = {}

    def run(self) -> Tabulated:
        of_op = [self._operator(i) for i in range(len(self.graph.ops))]
        written: dict[int, Place] = {
            t: (of_op[i], k)
            for i, op in enumerate(self.graph.ops)
            for k, t in enumerate(op.results)
        }
        for index, tensor in enumerate(self.graph.tensors):
            readers = [(of_op[i], k) for i, k in self.saved.readers.get(index, ())]
            if tensor.role == "parameter" and readers:
                self._parameter(index, readers)
            elif tensor.role == "activation" and index not in self.constant:
                self._activation(index, written[index], readers)
        problem = Problem(
            tuple(self.costs),
            tuple((e.source, e.target) for e in self.edges),
            tuple(self.edge_costs),
            tuple(self.bytes),
            tuple(self.edge_bytes),
            tuple(self._name(v) for v in self.vertices),
        )
        decided = (tuple(self.vertices), tuple(self.edges))
        return Tabulated(self.mesh, *decided, problem, self.regions, self.passes)

    def _name(self, vertex: Vertex) -> str:
        named = self.graph.ops if vertex.what == "op" else self.graph.tensors
        return named[vertex.index].name

    def _vertex(self, vertex: Vertex, costs: Values, memory: Values) -> int:
        self.vertices.append(vertex)
        self.costs.append(costs)
        self.bytes.append(memory)
        return len(self.vertices) - 1

    def _edge(self, edge: Edge) -> None:
        tensor, subdims = self.graph.tensors[edge.tensor], self.subdims.tensors[edge.tensor]
        again = None if edge.regathers is None else edge.regathers.tobytes()
        kind = (tensor.role, tensor.type.item_bytes, tensor.requires_grad, subdims)
        if self.vertices[edge.target].what == "op" and not self._flows((edge.target, 0)):
            edge = replace(edge, flows=False)
        ways = (edge.again, edge.flows, edge.sums)
        key = ("edge", kind, id(edge.left), id(edge.needed), again, *ways)
        if key not in self.cache:
            # The edge is kept in the cache, so that no other layouts can take its ids.
            seconds = self.prices.seconds(edge, tensor, subdims)
            self.cache[key] = (seconds, self.prices.bytes(edge, tensor, subdims), edge)
        costs, memory, _ = self.cache[key]
        self.edges.append(edge)
        self.edge_costs.append(costs)
        self.edge_bytes.append(memory)

    # Operators

    def _operator(self, index: int) -> int:
        rule = self.subdims.rules[index]
        tensors = Tensors.of(self.graph, self.subdims, index)
        results = self.graph.ops[index].results
        constant = all(t in self.constant for t in results)
        kept = self.saved.by_operator(index)
        later = tuple(k for k, t in enumerate(results) if constant and self.saved.by_reader(t))
        again = self.regions.runs_again(index)
        key = ("op", constant, id(rule), tensors, kept, later, again)
        if key not in self.cache:
            space = space_of(rule, self.mesh)
            if constant:
                space = Space(rule, np.full((1, len(self.mesh.axes)), -1, dtype=np.int8))
            steps = operator_steps(space, tensors, self.mesh, again)
            costs = price(steps, self.model, self.passes)
            memory = saved_bytes(space, tensors, kept, self.mesh)
            memory = memory + sum(tensors.results[k].bytes for k in later)
            self.cache[key] = (space, costs, memory)
        space, costs, memory = self.cache[key]
        return self._vertex(Vertex("op", index, space=space), costs, memory)

    def _layouts(self, place: Place, side: str) -> Layouts:
        """An operator's layouts of one tensor, one object for all operators that agree on them."""
        space = self.vertices[place[0]].space
        assert space is not None
        key = (side, place[1], id(space))
        if key not in self.cache:
            take = space.result_layouts if side == "result" else space.operand_layouts
            found = take(place[1])
            self.cache[key] = self.cache.setdefault(("rows", found.shape, found.tobytes()), found)
        layouts: Layouts = self.cache[key]
        return layouts

    # Tensors between operators

    def _activation(self, tensor: int, writer: Place, readers: list[Place]) -> None:
        left = self._layouts(writer, "result")
        if tensor == self.graph.loss:
            whole = np.full((1, len(self.mesh.axes)), REPLICATED, dtype=np.int8)
            self._kept(tensor, writer, self.cache.setdefault("whole", whole), [])
        elif len(readers) == 1:
            needed = self._layouts(readers[0], "operand")
            again = self._reads_again(readers[0])
            self._edge(Edge(tensor, writer[0], readers[0][0], left, needed, again=again))
        elif readers:
            sides = [left, *(self._layouts(reader, "operand") for reader in readers)]
            self._kept(tensor, writer, self._options(tensor, sides), readers)

    def _kept(self, tensor: int, writer: Place, options: Layouts, readers: list[Place]) -> None:
        """A vertex for the layout in which a tensor is kept for all its readers."""
        key = ("kept", self.graph.tensors[tensor].type, self.subdims.tensors[tensor], id(options))
        saved = self.saved.by_anyone(tensor)
        if (key, saved) not in self.cache:
            memory = self._local_bytes(tensor, options) if saved else np.zeros(len(options))
            self.cache[key, saved] = (np.zeros(len(options)), memory, options)
        costs, memory, _ = self.cache[key, saved]
        vertex = self._vertex(Vertex("tensor", tensor, layouts=options), costs, memory)
        left = self._layouts(writer, "result")
        again = self.regions.runs_again(self.vertices[writer[0]].index)
        self._edge(Edge(tensor, writer[0], vertex, left, options, again=again))
        for reader in readers:
            needed = self._layouts(reader, "operand")
            again = self._reads_again(reader)
            self._edge(Edge(tensor, vertex, reader[0], options, needed, again=again))

    def _options(self, tensor: int, sides: list[Layouts]) -> Layouts:
        """Every combination, axis by axis, of states that the writer or a reader knows."""
        grad, subdims = self.graph.tensors[tensor].requires_grad, self.subdims.tensors[tensor]
        key = ("options", grad, subdims, tuple(sorted({id(side) for side in sides})))
        if key not in self.cache:
            per_axis = []
            for axis in range(len(self.mesh.axes)):
                states = {int(s) for side in sides for s in np.unique(side[:, axis])}
                split = states - {PENDING, SHARED, REPLICATED}
                per_axis.append(sorted(split | ({REPLICATED, SHARED} if grad else {REPLICATED})))
            grid = list(product(*per_axis))
            rows = np.array(grid, dtype=np.int8).reshape(len(grid), len(self.mesh.axes))
            self.cache[key] = rows[_is_legal(rows, subdims, self.mesh)]
        options: Layouts = self.cache[key]
        return options

    # Parameters

    def _parameter(self, tensor: int, readers: list[Place]) -> None:
        needed = [self._layouts(reader, "operand") for reader in readers]
        kind, subdims = self.graph.tensors[tensor].type, self.subdims.tensors[tensor]
        trained = self.graph.tensors[tensor].requires_grad
        # Backward meets the first reader last: its edge takes the sum of all to where it is stored.
        flowing = [k for k, reader in enumerate(readers) if trained and self._flows(reader)]
        key = ("parameter", kind, subdims, trained, tuple(flowing), tuple(id(n) for n in needed))
        if key not in self.cache:
            summed = summed_axes([needed[k] for k in flowing]) if self.sums else ()
            storage = storages(needed, subdims, self.mesh, summed)
            memory = self._local_bytes(tensor, storage.layouts)
            costs = np.zeros(len(storage.layouts))
            if trained:
                steps = update_steps(storage, subdims, kind, self.optimizer, self.mesh)
                costs = price(steps, self.model, self.passes)
                if self.passes > 1:
                    added = sum_up_steps(storage, subdims, kind, self.mesh)
                    costs = costs + price(added, self.model, self.passes)
                # The parameter, its gradient, and the optimizer's state.
                memory = memory * (2 + self.optimizer.states)
            self.cache[key] = (storage, costs, memory)
        storage, costs, memory = self.cache[key]
        chosen = Vertex("parameter", tensor, layouts=storage.layouts, storage=storage)
        vertex = self._vertex(chosen, costs, memory)
        kept, drops = storage.layouts, storage.regathers
        for k, ((reader, position), layouts) in enumerate(zip(readers, needed, strict=True)):
            # Backward gathers again only what it needs: a bias or an embedding's table is not.
            again = self._reads_again((reader, position))
            is_used_again = self._saves(reader, position) and self._flows((reader, position))
            regathers = storage.regathers & is_used_again
            sums = storage.has_sums and k == flowing[0]
            edge = Edge(tensor, vertex, reader, kept, layouts, regathers, drops, again, sums=sums)
            self._edge(edge)

    def _flows(self, reader: Place) -> bool:
        """Whether a gradient comes back to the operator of a vertex."""
        results = self.graph.ops[self.vertices[reader[0]].index].results
        return any(self.graph.tensors[t].requires_grad for t in results)

    def _reads_again(self, reader: Place) -> bool:
        """Whether an operator is in a region that is recomputed."""
        return self.regions.of(self.vertices[reader[0]].index) is not None

    def _saves(self, vertex: int, position: int) -> bool:
        """Whether the operator of a vertex needs that operand again in backward."""
        index = self.vertices[vertex].index
        gradients = [self.graph.tensors[t].requires_grad for t in self.graph.ops[index].inputs]
        return self.subdims.rules[index].rule.needs_again(position, gradients)

    def _local_bytes(self, tensor: int, layouts: Layouts) -> Values:
        items = local_items(forward_states(layouts), self.subdims.tensors[tensor], self.mesh.shape)
        return items * self.graph.tensors[tensor].type.item_bytes


def _is_legal(rows: Layouts, subdims: tuple[int, ...], mesh: Mesh) -> NDArray[np.bool_]:
    """Which layouts split every atom legally."""
    counts = split_counts(rows, len(subdims), mesh.shape)
    legal = np.ones(len(rows), dtype=bool)
    for k, size in enumerate(subdims):
        for parts in np.unique(counts[:, k]):
            if not is_legal_split(size, int(parts)):
                legal &= counts[:, k] != parts
    return legal
