"""From a graph on a mesh to a search problem: one vertex a decision, one table a distinct pair.

The decisions are: a configuration for each operator; the layout in which a tensor with several
readers is kept for them; the storage of each parameter. A vertex costs its own steps, an edge
the reshards between two decisions, forward and backward. Equal operators share one table object
and equal edges another, so a table is priced once however deep the model is, and the search can
fold what is shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardfold.cluster import Mesh
from shardfold.costs.model import CostModel, price
from shardfold.costs.reshard import reshard, reshard_all
from shardfold.costs.steps import Phase, Steps, joined
from shardfold.costs.storage import Optimizer, Storage, storages, update_steps
from shardfold.costs.work import Tensors, operand_local_bytes, operator_steps, result_bytes
from shardfold.graph import Graph
from shardfold.search import Problem
from shardfold.spaces import Atoms, Space, space_of
from shardfold.spaces.layout import (
    PENDING,
    REPLICATED,
    SHARED,
    Layouts,
    distinct,
    forward_states,
    gradient_states,
    local_items,
)

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Vertex:
    """A decision: an operator's configuration, a tensor's layout, or a parameter's storage."""

    what: str  # "op", "tensor" or "parameter"
    index: int  # of the operator or the tensor in the graph
    space: Space | None = None
    layouts: Layouts | None = None
    storage: Storage | None = None

    @property
    def choices(self) -> int:
        """How many choices there are."""
        if self.space is not None:
            return len(self.space.configs)
        assert self.layouts is not None
        return len(self.layouts)


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor that goes from one decision to another: what one leaves, what the other needs."""

    tensor: int
    source: int
    target: int
    left: Layouts
    needed: Layouts
    regathers: NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class Tabulated:
    """A search problem, and what its vertices and edges stand for."""

    mesh: Mesh
    vertices: tuple[Vertex, ...]
    edges: tuple[Edge, ...]
    problem: Problem


def tabulate(
    graph: Graph, atoms: Atoms, mesh: Mesh, model: CostModel, optimizer: Optimizer
) -> Tabulated:
    """Price every choice of every decision of `graph` on `mesh`."""
    return _Tabulator(graph, atoms, mesh, model, optimizer).run()


class _Tabulator:
    """Collects vertices and edges; every priced table is cached by what it depends on."""

    def __init__(
        self, graph: Graph, atoms: Atoms, mesh: Mesh, model: CostModel, optimizer: Optimizer
    ) -> None:
        self.graph, self.atoms, self.mesh = graph, atoms, mesh
        self.model, self.optimizer = model, optimizer
        self.readers = graph.readers()
        self.vertices: list[Vertex] = []
        self.costs: list[Array] = []
        self.bytes: list[Array] = []
        self.edges: list[Edge] = []
        self.edge_costs: list[Array] = []
        self.edge_bytes: list[Array] = []
        self.cache: dict[Any, Any] = {}

    def run(self) -> Tabulated:
        constant = constant_tensors(self.graph)
        of_op = [
            self._operator(i, op.results[0] in constant if op.results else True)
            for i, op in enumerate(self.graph.ops)
        ]
        producer = {
            t: (of_op[i], k)
            for i, op in enumerate(self.graph.ops)
            for k, t in enumerate(op.results)
        }
        for tensor in range(len(self.graph.tensors)):
            role = self.graph.tensors[tensor].role
            readers = [(of_op[i], k) for i, k in self.readers.get(tensor, ())]
            if role == "parameter" and readers:
                self._parameter(tensor, readers)
            elif role == "activation" and tensor not in constant:
                self._activation(tensor, producer[tensor], readers)
        problem = Problem(
            tuple(self.costs),
            tuple((e.source, e.target) for e in self.edges),
            tuple(self.edge_costs),
            tuple(self.bytes),
            tuple(self.edge_bytes),
            tuple(self._name(v) for v in self.vertices),
        )
        return Tabulated(self.mesh, tuple(self.vertices), tuple(self.edges), problem)

    def _name(self, vertex: Vertex) -> str:
        return (
            self.graph.ops[vertex.index].name
            if vertex.what == "op"
            else self.graph.tensors[vertex.index].name
        )

    def _add(self, vertex: Vertex, costs: Array, memory: Array) -> int:
        self.vertices.append(vertex)
        self.costs.append(costs)
        self.bytes.append(memory)
        return len(self.vertices) - 1

    # Operators

    def _operator(self, index: int, constant: bool) -> int:
        rule = self.atoms.rules[index]
        tensors = operator_tensors(self.graph, self.atoms, index)
        kept = self._kept(index)
        key = ("op", constant, id(rule), tensors, kept)
        if key not in self.cache:
            space = space_of(rule, self.mesh)
            if constant:
                space = Space(rule, np.full((1, len(self.mesh.axes)), -1, dtype=np.int8))
            costs = price(operator_steps(space, tensors, self.mesh), self.model)
            self.cache[key] = (space, costs, self._saved(space, tensors, kept))
        space, costs, memory = self.cache[key]
        return self._add(Vertex("op", index, space=space), costs, memory)

    def _kept(self, index: int) -> tuple[tuple[int, ...], bool]:
        """Operands and result that this operator keeps for backward and nobody else accounts for.

        A tensor with several readers is accounted for where its layout is decided; a result that
        its reader keeps anyway is accounted for there.
        """
        op, rule = self.graph.ops[index], self.atoms.rules[index].rule
        if not any(self.graph.tensors[t].requires_grad for t in op.results):
            return (), False
        operands = tuple(
            k
            for k in rule.saves
            if self.graph.tensors[op.inputs[k]].role == "activation"
            and len(self.readers[op.inputs[k]]) == 1
        )
        return operands, rule.saves_results and not self._reader_keeps(op.results[0])

    def _reader_keeps(self, tensor: int) -> bool:
        return len(self.readers.get(tensor, ())) > 1 or self._saved_by_reader(tensor)

    def _saved_by_reader(self, tensor: int) -> bool:
        return any(
            k in self.atoms.rules[i].rule.saves
            and any(self.graph.tensors[t].requires_grad for t in self.graph.ops[i].results)
            for i, k in self.readers.get(tensor, ())
        )

    def _saved(self, space: Space, tensors: Tensors, kept: tuple[tuple[int, ...], bool]) -> Array:
        operands, result = kept
        memory = np.zeros(len(space.configs))
        for k in operands:
            memory += operand_local_bytes(
                space, k, tensors.inputs[k], tensors.input_atoms[k], self.mesh
            )
        return memory + result_bytes(space, tensors, self.mesh) if result else memory

    # Tensors between operators

    def _activation(
        self, tensor: int, source: tuple[int, int], readers: list[tuple[int, int]]
    ) -> None:
        left = self._left(*source)
        if tensor == self.graph.loss:
            whole = np.full((1, len(self.mesh.axes)), REPLICATED, dtype=np.int8)
            self._keep(tensor, source[0], left, whole, [])
        elif len(readers) == 1:
            self._edge(tensor, source[0], readers[0][0], left, self._needed(*readers[0]))
        elif readers:
            options = self._kept_layouts(tensor, left, readers)
            self._keep(tensor, source[0], left, options, readers)

    def _keep(
        self,
        tensor: int,
        source: int,
        left: Layouts,
        options: Layouts,
        readers: list[tuple[int, int]],
    ) -> None:
        """A vertex for the layout in which a tensor is kept for all its readers."""
        memory = np.zeros(len(options))
        if self._saved_by_reader(tensor) or self._saved_by_producer(tensor):
            memory = self._local_bytes(tensor, options)
        zero = self.cache.setdefault(("zero", len(options)), np.zeros(len(options)))
        key = ("kept", memory.tobytes())
        memory = self.cache.setdefault(key, memory)
        vertex = self._add(Vertex("tensor", tensor, layouts=options), zero, memory)
        self._edge(tensor, source, vertex, left, options)
        for reader, operand in readers:
            self._edge(tensor, vertex, reader, options, self._needed(reader, operand))

    def _saved_by_producer(self, tensor: int) -> bool:
        return any(
            tensor in op.results and self.atoms.rules[i].rule.saves_results
            for i, op in self._producers(tensor)
        )

    def _producers(self, tensor: int) -> list[tuple[int, Any]]:
        if "producers" not in self.cache:
            self.cache["producers"] = {
                t: (i, op) for i, op in enumerate(self.graph.ops) for t in op.results
            }
        found = self.cache["producers"].get(tensor)
        return [found] if found else []

    def _kept_layouts(self, tensor: int, left: Layouts, readers: list[tuple[int, int]]) -> Layouts:
        """Every combination, axis by axis, of states that the producer or a reader knows."""
        sides = [left, *(self._needed(*reader) for reader in readers)]
        grad = self.graph.tensors[tensor].requires_grad
        key = ("options", grad, tuple(sorted({id(side) for side in sides})))
        if key not in self.cache:
            per_axis = []
            for axis in range(len(self.mesh.axes)):
                states = {int(s) for side in sides for s in np.unique(side[:, axis])}
                states = {REPLICATED if s in (PENDING, SHARED) else s for s in states}
                states |= {REPLICATED, SHARED} if grad else {REPLICATED}
                per_axis.append(sorted(states))
            grid = list(product(*per_axis))
            rows = np.array(grid, dtype=np.int8).reshape(len(grid), len(self.mesh.axes))
            self.cache[key] = (rows[self._is_legal(tensor, rows)], sides)
        rows, _ = self.cache[key]
        found: Layouts = rows
        return found

    def _is_legal(self, tensor: int, rows: Layouts) -> NDArray[np.bool_]:
        from shardfold.spaces.layout import split_counts
        from shardfold.spaces.space import is_legal_split

        atoms = self.atoms.tensors[tensor]
        counts = split_counts(rows, len(atoms), self.mesh.shape)
        legal = np.ones(len(rows), dtype=bool)
        for k, size in enumerate(atoms):
            for parts in np.unique(counts[:, k]):
                if not is_legal_split(size, int(parts)):
                    legal &= counts[:, k] != parts
        return legal

    # Parameters

    def _parameter(self, tensor: int, readers: list[tuple[int, int]]) -> None:
        needed = [self._needed(*reader) for reader in readers]
        kind, atoms = self.graph.tensors[tensor].type, self.atoms.tensors[tensor]
        trained = self.graph.tensors[tensor].requires_grad
        key = ("parameter", kind, atoms, trained, tuple(id(n) for n in needed))
        if key not in self.cache:
            storage = storages(needed, atoms, self.mesh)
            memory = self._local_bytes(tensor, storage.layouts)
            costs = np.zeros(len(storage.layouts))
            if trained:
                steps = update_steps(
                    storage, atoms, kind.dtype, kind.item_bytes, self.optimizer, self.mesh
                )
                costs = price(steps, self.model)
                # The parameter, its gradient, and the optimizer's state.
                memory = memory * (2 + self.optimizer.states)
            self.cache[key] = (storage, costs, memory, needed)
        storage, costs, memory, _ = self.cache[key]
        vertex = self._add(
            Vertex("parameter", tensor, layouts=storage.layouts, storage=storage), costs, memory
        )
        for (reader, _), layouts in zip(readers, needed, strict=True):
            self._edge(tensor, vertex, reader, storage.layouts, layouts, storage.regathers)

    # Edges

    def _left(self, vertex: int, position: int) -> Layouts:
        return self._layouts(vertex, "result", position)

    def _needed(self, vertex: int, position: int) -> Layouts:
        return self._layouts(vertex, "operand", position)

    def _layouts(self, vertex: int, side: str, position: int) -> Layouts:
        """A configuration's layouts, one object for all operators that agree on them."""
        space = self.vertices[vertex].space
        assert space is not None
        key = ("layouts", side, position, id(space))
        if key not in self.cache:
            take = space.result_layouts if side == "result" else space.operand_layouts
            found = take(position)
            self.cache[key] = self.cache.setdefault(("rows", found.shape, found.tobytes()), found)
        layouts: Layouts = self.cache[key]
        return layouts

    def _edge(
        self,
        tensor: int,
        source: int,
        target: int,
        left: Layouts,
        needed: Layouts,
        regathers: NDArray[np.bool_] | None = None,
    ) -> None:
        found = self.graph.tensors[tensor]
        atoms = self.atoms.tensors[tensor]
        again = None if regathers is None else regathers.tobytes()
        key = (
            "edge",
            atoms,
            found.type.item_bytes,
            found.requires_grad,
            id(left),
            id(needed),
            again,
        )
        if key not in self.cache:
            edge = Edge(tensor, source, target, left, needed, regathers)
            self.cache[key] = (*self._price(edge), left, needed)
        costs, memory, _, _ = self.cache[key]
        self.edges.append(Edge(tensor, source, target, left, needed, regathers))
        self.edge_costs.append(costs)
        self.edge_bytes.append(memory)

    def _price(self, edge: Edge) -> tuple[Array, Array]:
        """Price values forward and gradients backward, each pair of distinct layouts once."""
        tensor = self.graph.tensors[edge.tensor]
        values = (forward_states(edge.left), forward_states(edge.needed))
        seconds = self._table(edge.tensor, *values, "forward")
        if edge.regathers is not None and edge.regathers.any():
            again = self._table(edge.tensor, *values, "backward")
            seconds = seconds + again * edge.regathers[:, None]
        if tensor.requires_grad:
            gradients = (gradient_states(edge.needed), gradient_states(edge.left))
            seconds = seconds + self._table(edge.tensor, *gradients, "backward").T
        if tensor.role != "parameter":
            zero = self.cache.setdefault(("zeros", seconds.shape), np.zeros(seconds.shape))
            return np.ascontiguousarray(seconds), zero
        # A gathered copy that is kept through the step, beside the stored part.
        assert edge.regathers is not None
        stored = self._local_bytes(edge.tensor, edge.left)[:, None]
        used = self._local_bytes(edge.tensor, edge.needed)[None, :]
        extra = np.where(edge.regathers[:, None] | (used <= stored), 0.0, used)
        return np.ascontiguousarray(seconds), extra

    def _table(self, tensor: int, sources: Layouts, targets: Layouts, phase: Phase) -> Array:
        """Seconds from every source to every target, priced on the distinct ones."""
        atoms, kind = self.atoms.tensors[tensor], self.graph.tensors[tensor].type
        rows, of_row = distinct(sources)
        columns, of_column = distinct(targets)
        key = ("reshard", atoms, kind.item_bytes, phase, rows.tobytes(), columns.tobytes())
        if key not in self.cache:
            steps = reshard_all(rows, columns, self.mesh.shape, atoms, kind.item_bytes, phase)
            self.cache[key] = price(steps, self.model).reshape(len(rows), len(columns))
        table: Array = self.cache[key]
        return table[of_row][:, of_column]

    def _local_bytes(self, tensor: int, layouts: Layouts) -> Array:
        kind = self.graph.tensors[tensor].type
        items = local_items(forward_states(layouts), self.atoms.tensors[tensor], self.mesh.shape)
        return items * kind.item_bytes


def operator_tensors(graph: Graph, atoms: Atoms, index: int) -> Tensors:
    """The types, atoms and gradients of an operator's tensors."""
    op, take = graph.ops[index], graph.tensors
    return Tensors(
        tuple(take[t].type for t in op.inputs),
        tuple(atoms.tensors[t] for t in op.inputs),
        tuple(take[t].requires_grad for t in op.inputs),
        tuple(take[t].type for t in op.results),
        tuple(atoms.tensors[t] for t in op.results),
        tuple(take[t].requires_grad for t in op.results),
    )


def edge_steps(
    left: Layouts,
    needed: Layouts,
    regathers: NDArray[np.bool_],
    mesh: Mesh,
    atoms: tuple[int, ...],
    item_bytes: int,
    requires_grad: bool,
) -> Steps:
    """The reshards of an edge, row by row: values forward, gradients backward."""
    values = (forward_states(left), forward_states(needed))
    parts = [reshard(*values, mesh.shape, atoms, item_bytes, "forward")]
    if regathers.any():
        again = reshard(*values, mesh.shape, atoms, item_bytes, "backward")
        parts.append(_only(again, regathers))
    if requires_grad:
        gradients = (gradient_states(needed), gradient_states(left))
        parts.append(reshard(*gradients, mesh.shape, atoms, item_bytes, "backward"))
    return joined(parts)


def _only(steps: Steps, keep: NDArray[np.bool_]) -> Steps:
    """The same steps without the rows that are not kept."""
    from dataclasses import replace

    from shardfold.costs.steps import Collective, Step

    found: list[Step] = []
    for step in steps.steps:
        assert isinstance(step, Collective)
        at = keep[step.rows]
        if at.any():
            assert step.before is not None
            assert step.after is not None
            found.append(
                replace(
                    step,
                    rows=step.rows[at],
                    bytes=step.bytes[at],
                    before=step.before[at],
                    after=step.after[at],
                )
            )
    return Steps(steps.cases, tuple(found))


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
