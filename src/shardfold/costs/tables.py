"""From a graph on a mesh to a search problem: a vertex for each decision, a table for each pair.

A vertex costs its own steps, an edge the reshards between two decisions, forward and backward.
Equal operators share one table object and equal edges another, so a table is priced once however
deep the model is, and the search can fold what is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardfold.cluster import Mesh
from shardfold.costs.activations import KEEP_ALL, Regions, Saved, saved_bytes
from shardfold.costs.decision_graph import (
    Edge,
    Leg,
    Sides,
    Vertex,
    Wiring,
    constant_tensors,
    gradient_readers,
    shared_tensors,
    wire,
)
from shardfold.costs.model import CostModel, price, sums_gradients
from shardfold.costs.operator_steps import Tensors
from shardfold.costs.optimizers import Optimizer
from shardfold.costs.parameters import (
    Storage,
    storages,
    sum_up_steps,
    summed_axes,
    update_steps,
)
from shardfold.costs.priced import PricedOperators
from shardfold.costs.reshard import reshard_all
from shardfold.costs.steps import Phase, Values, defer
from shardfold.graph import Graph
from shardfold.search import Problem
from shardfold.sharding import Subdims
from shardfold.sharding.configs import is_legal_split
from shardfold.sharding.layouts import (
    PENDING,
    REPLICATED,
    SHARED,
    Layouts,
    distinct,
    forward_states,
    local_items,
    split_counts,
)


@dataclass(frozen=True, slots=True)
class Tables:
    """A search problem, and what its vertices and edges stand for."""

    mesh: Mesh
    wiring: Wiring
    problem: Problem
    regions: Regions = KEEP_ALL
    micro_batches: int = 1  # over parts of the batch, in a step

    @property
    def vertices(self) -> tuple[Vertex, ...]:
        """The decisions; operator i is vertex i."""
        return self.wiring.vertices

    @property
    def edges(self) -> tuple[Edge, ...]:
        """What joins them."""
        return self.wiring.edges


def tabulate(
    graph: Graph,
    subdims: Subdims,
    mesh: Mesh,
    model: CostModel,
    optimizer: Optimizer,
    regions: Regions = KEEP_ALL,
    prices: EdgePrices | None = None,
    micro_batches: int = 1,
) -> Tables:
    """Price every choice of every decision of `graph` on `mesh`; `regions` are recomputed.

    `prices` of the same mesh, model and number of passes, where there are any, are used and added
    to. The graph is that of one pass; seconds are of a step, which takes so many.
    """
    prices = EdgePrices(mesh, model, micro_batches) if prices is None else prices
    assert prices.micro_batches == micro_batches
    return _Tabulator(graph, subdims, mesh, model, optimizer, regions, prices).run()


class _Tabulator:
    """Collects vertices, then prices edges; a table is cached by what it depends on."""

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
        self.prices, self.micro_batches = prices, prices.micro_batches
        self.constant = constant_tensors(graph)
        self.readers, self.writers = graph.readers(), graph.writers()
        self.vertices: list[Vertex] = []
        self.costs: list[Values] = []
        self.bytes: list[Values] = []
        self.cache: dict[Any, Any] = {}

    def run(self) -> Tables:
        for index in range(len(self.graph.ops)):
            self._operator(index)
        spaces = [vertex.space for vertex in self.vertices if vertex.space is not None]
        sides = Sides(spaces, self.prices.sides)
        shared = set(shared_tensors(self.graph))
        for index, tensor in enumerate(self.graph.tensors):
            if tensor.role == "parameter" and index in self.readers:
                self._parameter(index, sides)
            elif index in shared:
                self._shared(index, sides)
        wiring = wire(self.graph, self.subdims, self.vertices, sides, self.regions)
        priced = [self.prices.of(edge) for edge in wiring.edges]
        problem = Problem(
            tuple(self.costs),
            tuple((e.source, e.target) for e in wiring.edges),
            tuple(seconds for seconds, _ in priced),
            tuple(self.bytes),
            tuple(size for _, size in priced),
            tuple(self._name(v) for v in self.vertices),
        )
        return Tables(self.mesh, wiring, problem, self.regions, self.micro_batches)

    def _name(self, vertex: Vertex) -> str:
        named = self.graph.ops if vertex.what == "op" else self.graph.tensors
        return named[vertex.index].name

    def _vertex(self, vertex: Vertex, costs: Values, memory: Values) -> None:
        self.vertices.append(vertex)
        self.costs.append(costs)
        self.bytes.append(memory)

    # Operators

    def _operator(self, index: int) -> None:
        rule = self.subdims.rules[index]
        tensors = Tensors.of(self.graph, self.subdims, index)
        results = self.graph.ops[index].results
        constant = all(t in self.constant for t in results)
        kept = self.saved.by_operator(index)
        later = tuple(k for k, t in enumerate(results) if constant and self.saved.by_reader(t))
        again = self.regions.runs_again(index)
        float8 = tensors.access.is_float8
        key = ("op", constant, id(rule), tensors, kept, later, again, float8)
        space = self.prices.operators.space(rule, is_whole=constant)
        priced = self.prices.operators.of(space, tensors, again)
        if key not in self.cache:
            costs = priced.costs(self.micro_batches)
            memory = saved_bytes(space, tensors, kept, self.mesh)
            memory = memory + sum(tensors.results[k].bytes for k in later)
            self.cache[key] = (costs, memory)
        self._vertex(Vertex("op", index, space=space, priced=priced), *self.cache[key])

    # Tensors that several operators read, and the loss

    def _shared(self, tensor: int, sides: Sides) -> None:
        """A vertex for the layout that all readers of a tensor share."""
        options = self._options(tensor, sides)
        saved = self.saved.by_anyone(tensor)
        kind = (self.graph.tensors[tensor].type, self.subdims.tensors[tensor], id(options), saved)
        if ("shared", kind) not in self.cache:
            memory = self._local_bytes(tensor, options) if saved else np.zeros(len(options))
            self.cache["shared", kind] = (np.zeros(len(options)), memory)
        costs, memory = self.cache["shared", kind]
        self._vertex(Vertex("tensor", tensor, layouts=options), costs, memory)

    def _options(self, tensor: int, sides: Sides) -> Layouts:
        """Every combination, axis by axis, of states that the writer or a reader knows."""
        if tensor == self.graph.loss:
            whole = np.full((1, len(self.mesh.axes)), REPLICATED, dtype=np.int8)
            layouts: Layouts = self.prices.known.setdefault("loss", whole)
            return layouts
        known = [sides.result(*self.writers[tensor])]
        known += [sides.operand(*reader) for reader in self.readers[tensor]]
        grad, subdims = self.graph.tensors[tensor].requires_grad, self.subdims.tensors[tensor]
        key = ("options", grad, subdims, tuple(sorted({id(side) for side in known})))
        if key not in self.prices.known:
            per_axis = []
            for axis in range(len(self.mesh.axes)):
                states = {int(s) for side in known for s in np.unique(side[:, axis])}
                split = states - {PENDING, SHARED, REPLICATED}
                per_axis.append(sorted(split | ({REPLICATED, SHARED} if grad else {REPLICATED})))
            grid = list(product(*per_axis))
            rows = np.array(grid, dtype=np.int8).reshape(len(grid), len(self.mesh.axes))
            self.prices.known[key] = rows[_is_legal(rows, subdims, self.mesh)]
        options: Layouts = self.prices.known[key]
        return options

    # Parameters

    def _parameter(self, tensor: int, sides: Sides) -> None:
        readers = self.readers[tensor]
        needed = [sides.operand(*reader) for reader in readers]
        flowing = [readers.index(r) for r in gradient_readers(self.graph, tensor, readers)]
        kind, subdims = self.graph.tensors[tensor].type, self.subdims.tensors[tensor]
        trained, dims = self.graph.tensors[tensor].requires_grad, self.subdims.dims[tensor]
        key = ("parameter", kind, subdims, trained, tuple(flowing), tuple(id(n) for n in needed))
        if key not in self.cache:
            summed = [needed[k] for k in flowing] if sums_gradients(self.model) else []
            storage = self._storage(needed, subdims, dims, summed_axes(summed))
            self.cache[key] = (storage, *self._stored(tensor, storage))
        storage, costs, memory = self.cache[key]
        vertex = Vertex("parameter", tensor, layouts=storage.layouts, storage=storage)
        self._vertex(vertex, costs, memory)

    def _storage(
        self,
        needed: Sequence[Layouts],
        subdims: tuple[int, ...],
        dims: tuple[int, ...],
        summed: tuple[int, ...],
    ) -> Storage:
        key = ("storage", tuple(map(id, needed)), subdims, dims, summed)
        if key not in self.prices.known:
            self.prices.known[key] = storages(needed, subdims, dims, self.mesh, summed)
        found: Storage = self.prices.known[key]
        return found

    def _stored(self, tensor: int, storage: Storage) -> tuple[Values, Values]:
        """Seconds and bytes of each storage: update, and all that is as large as its part."""
        kind, subdims = self.graph.kept_type(tensor), self.subdims.tensors[tensor]
        fresh_bytes = self.graph.tensors[tensor].type.item_bytes
        memory = self._local_bytes(tensor, storage.layouts) * (kind.item_bytes / fresh_bytes)
        if not self.graph.tensors[tensor].requires_grad:
            return np.zeros(len(memory)), memory
        steps = update_steps(storage, subdims, kind, self.optimizer, self.mesh)
        costs = price(steps, self.model, self.micro_batches)
        if self.micro_batches > 1:
            added = sum_up_steps(storage, subdims, kind, self.mesh, fresh_bytes)
            costs = costs + price(added, self.model, self.micro_batches)
        # The parameter, its gradient, and the optimizer's state.
        return costs, memory * (2 + self.optimizer.states)

    def _local_bytes(self, tensor: int, layouts: Layouts) -> Values:
        items = local_items(forward_states(layouts), self.subdims.tensors[tensor], self.mesh.shape)
        return items * self.graph.tensors[tensor].type.item_bytes


class EdgePrices:
    """What is priced on one mesh, whatever the graph: operators, and edges by their layouts.

    Each pair of distinct layouts is priced once. Seconds are those of a training step of so many
    passes.
    """

    def __init__(self, mesh: Mesh, model: CostModel, micro_batches: int = 1) -> None:
        self.mesh, self.model, self.micro_batches = mesh, model, micro_batches
        self.operators = PricedOperators(mesh, model)
        self.sides: dict[object, Layouts] = {}  # of the operators
        self.known: dict[Any, Any] = {}  # storages, and layouts that readers share
        self.edges: dict[object, tuple[Edge, Values, Values]] = {}
        self.tables: dict[object, Values] = {}
        self.zeros: dict[tuple[int, ...], Values] = {}

    def of(self, edge: Edge) -> tuple[Values, Values]:
        """Seconds and bytes of an edge: made once for all graphs and blocks that run again."""
        regathers = None if edge.regathers is None else edge.regathers.tobytes()
        tensor = (edge.subdims, edge.item_bytes, id(edge.left), id(edge.needed))
        moved = (edge.is_recomputed, edge.has_gradient, edge.reduces_sum, edge.cast)
        key = (tensor, regathers, edge.is_used_backward, *moved)
        if key not in self.edges:
            self.edges[key] = edge, self.seconds(edge), self.bytes(edge)
        return self.edges[key][1:]

    def seconds(self, edge: Edge) -> Values:
        """Seconds for every choice of the source (rows) and of the target (columns)."""
        total = np.zeros((len(edge.left), len(edge.needed)))
        for leg in edge.legs(self.micro_batches):
            total += self._leg(edge, leg)
            if edge.cast is not None:
                total += self._casts(edge, leg)
        return total

    def _casts(self, edge: Edge, leg: Leg) -> Values:
        """Of a parameter that is kept in another dtype."""
        first, last = (
            0.0 if cast is None else self.model.compute_seconds(cast) * self.micro_batches
            for cast in edge.casts(leg, self.mesh.shape)
        )
        source, target = np.asarray(first), np.asarray(last)
        if leg.what == "value":
            source = source if leg.only is None else source * leg.only
            return source[:, None]
        # What comes from a reader is cast in its layout, what is kept in the parameter's own.
        found: Values = source + (target[:, None] if target.ndim else target)
        return found

    def _leg(self, edge: Edge, leg: Leg) -> Values:
        if leg.what == "sum":  # whatever the reader needs
            steps = edge.steps(leg, self.mesh.shape)
            return price(steps, self.model, self.micro_batches)[:, None]
        table = self._table(edge, leg)
        table = table.T if leg.what == "gradient" else table
        return table if leg.only is None else table * leg.only[:, None]

    def _table(self, edge: Edge, leg: Leg) -> Values:
        """Every source against every target of a reshard."""
        rows, of_row = distinct(leg.source)
        columns, of_column = distinct(leg.target)
        # What is moved again for recomputation costs as much as the first time.
        phase: Phase = "forward" if leg.phase == "recompute" else leg.phase
        kind = (edge.subdims, edge.sent_bytes(leg), phase, leg.may_defer)
        key = (*kind, rows.tobytes(), columns.tobytes())
        if key not in self.tables:
            shape, size = self.mesh.shape, edge.sent_bytes(leg)
            steps = reshard_all(rows, columns, shape, edge.subdims, size, phase)
            costs = price(defer(steps) if leg.may_defer else steps, self.model, self.micro_batches)
            self.tables[key] = costs.reshape(len(rows), len(columns))
        return self.tables[key][of_row][:, of_column]

    def bytes(self, edge: Edge) -> Values:
        """Bytes of a parameter, gathered or cast, that is kept through the step beside its part."""
        shape = (len(edge.left), len(edge.needed))
        if edge.storage is None or edge.is_recomputed:
            return self.zeros.setdefault(shape, np.zeros(shape))
        stored = local_items(forward_states(edge.left), edge.subdims, self.mesh.shape)[:, None]
        used = local_items(forward_states(edge.needed), edge.subdims, self.mesh.shape)[None, :]
        is_copy = (used > stored) | (edge.cast is not None and edge.is_used_backward)
        dropped = edge.storage.regathers[:, None] | ~is_copy
        return np.where(dropped, 0.0, used * edge.item_bytes)


def _is_legal(rows: Layouts, subdims: tuple[int, ...], mesh: Mesh) -> NDArray[np.bool_]:
    """Which layouts split every sub-dim legally."""
    counts = split_counts(rows, len(subdims), mesh.shape)
    legal = np.ones(len(rows), dtype=bool)
    for k, size in enumerate(subdims):
        for parts in np.unique(counts[:, k]):
            if not is_legal_split(size, int(parts)):
                legal &= counts[:, k] != parts
    return legal
