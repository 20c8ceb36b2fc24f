"""Bytes that a device surely holds at two moments of a step, whatever else it holds.

As forward ends, it holds the stored parts of parameters, the optimizer's state and what autograd
keeps; as backward ends, parameters, state and gradients. Early in backward, at the operators after
the repeated layers, nearly all that is kept is still there, and the gradients of large results as
well: the fullest of these moments stands for the end of forward. The peak is no less than either.

A kept tensor or a gradient is held at least as the share that falls to each device; the tensor
unless its writer is run again in backward, which takes at least the writer's work. So the bytes of
parameters are sums over decisions, and those of activations a trade of bytes against seconds that
no choice of splits escapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardfold.cluster import Mesh
from shardfold.costs.activations import keeps_results, kept_operands
from shardfold.costs.memory_format import aliases
from shardfold.costs.optimizers import Optimizer
from shardfold.costs.steps import Values
from shardfold.costs.tables import Tables
from shardfold.graph import Graph
from shardfold.graph.repeats import MODEL
from shardfold.search.minimum_cut import SINK, SOURCE, Arc, minimum_cut
from shardfold.sharding import Subdims
from shardfold.sharding.layouts import forward_states, local_items

MOMENTS = 2  # as forward ends or soon after, as backward ends


@dataclass(frozen=True, slots=True)
class Root:
    """A tensor that owns its memory: who writes it, which operators read it, itself or a view.

    `bytes` is the least that a device has of it. `until` is the operator whose backward is the last
    that needs it; none where backward needs it only if its readers run again.
    """

    writer: int
    bytes: float
    readers: tuple[int, ...]
    until: int | None


@dataclass(frozen=True, slots=True)
class Cell:
    """Operators of one layer, or outside of all: how often they are in the model, and their roots.

    `entering` are read here and written elsewhere: what runs again keeps them as they lie there.
    """

    times: int
    made: tuple[Root, ...]
    entering: tuple[Root, ...]

    @property
    def operators(self) -> list[int]:
        """All that may run again here."""
        readers = {op for root in (*self.made, *self.entering) for op in root.readers}
        return sorted({root.writer for root in self.made} | readers)


class Held:
    """The bytes of a graph on a mesh at both moments."""

    def __init__(
        self, graph: Graph, subdims: Subdims, tables: Tables, optimizer: Optimizer, workspace: int
    ) -> None:
        self.graph, self.subdims, self.tables = graph, subdims, tables
        self.optimizer = optimizer
        self.cells, gradients = early_in_backward(graph, subdims, tables.mesh)
        self.fixed = np.full(MOMENTS, float(workspace) + self._inputs())
        self.fixed[0] += gradients
        self.stored = [self._stored(v) for v in range(len(tables.vertices))]

    def _inputs(self) -> float:
        """Inputs and buffers are whole everywhere, for the whole step."""
        times = {"input": self.tables.micro_batches, "buffer": 1}
        return float(sum(times.get(t.role, 0) * t.type.bytes for t in self.graph.tensors))

    def _stored(self, v: int) -> Values | None:
        """Of a parameter, the bytes of each storage at each moment."""
        vertex = self.tables.vertices[v]
        if vertex.storage is None:
            return None
        tensor, mesh = self.graph.tensors[vertex.index], self.tables.mesh
        layouts = forward_states(vertex.storage.layouts)
        items = local_items(layouts, self.subdims.tensors[vertex.index], mesh.shape)
        size = items * self.graph.kept_type(vertex.index).item_bytes
        if not tensor.requires_grad:
            return np.array([size] * MOMENTS)
        always = 1 + self.optimizer.states + (self.tables.micro_batches > 1)
        readers = self.graph.readers().get(vertex.index, ())
        flows = any(self.graph.has_gradient(op) for op, _ in readers)
        alone = self.tables.micro_batches == 1 and flows
        return np.array([size * always, size * (always + alone)])

    def kept_bytes(self) -> float:
        """Of all that is kept where nothing runs again."""
        return sum(
            cell.times * root.bytes
            for cell in self.cells
            for root in cell.made
            if root.until is not None
        )

    def trade(self, price: float, running: Mapping[int, float]) -> Iterator[Trade]:
        """The least that each cell costs at a price for a byte, and for running operators again.

        Backward needs what it reads, kept or made again by its writer, which needs what it reads.
        That is a minimum cut.
        """
        for cell in self.cells:
            number = {op: 2 + k for k, op in enumerate(cell.operators)}
            arcs: list[Arc] = [(v, SINK, running.get(op, 0.0)) for op, v in number.items()]
            owners = [(root, number[root.writer]) for root in cell.made]
            owners += [(root, SINK) for root in cell.entering]
            count = 2 + len(number)
            for root, owner in owners:
                if root.until is None:  # needed only by what runs again
                    arcs.append((count, owner, price * root.bytes))
                    arcs += [(number[op], count, math.inf) for op in root.readers]
                    count += 1
                elif owner != SINK:
                    arcs.append((SOURCE, owner, price * root.bytes))
            cost, done = minimum_cut(count, arcs)
            again = tuple(op for op, v in number.items() if v in done)
            yield Trade(cell.times, cost, again, self._kept(cell, set(again)))

    @staticmethod
    def _kept(cell: Cell, again: set[int]) -> float:
        """Bytes that are kept of a cell if some of its operators run again."""
        total = 0.0
        for root in cell.made:
            is_needed = root.until is not None or not again.isdisjoint(root.readers)
            total += root.bytes * (is_needed and root.writer not in again)
        for root in cell.entering:
            total += root.bytes * (root.until is None and not again.isdisjoint(root.readers))
        return total


@dataclass(frozen=True, slots=True)
class Trade:
    """What a cell costs at least, the operators that then run again, and the bytes kept."""

    times: int
    cost: float
    again: tuple[int, ...]
    bytes: float


def early_in_backward(graph: Graph, subdims: Subdims, mesh: Mesh) -> tuple[list[Cell], float]:
    """What is kept at the fullest early moment, by layers, and the gradients beside it.

    Of a compiled step nothing is said: its compiler decides what is kept, and writes in place.
    """
    if graph.is_compiled:
        return [], 0.0
    devices = float(math.prod(mesh.shape))
    layers = _layers(graph)
    roots = _roots(graph, subdims, devices)

    count, first = len(graph.ops), max((each.end for each in graph.repeats), default=0)
    kept = np.zeros(count + 1)  # whose backward is the last that needs it
    for root in roots:
        if root.until is not None:
            kept[root.until] += root.bytes * layers[root.writer][1]
    held = np.cumsum(kept)  # at the backward of each operator
    gradients = {count: 0.0}
    gradients |= {op: _gradient_bytes(graph, subdims, op) / devices for op in range(first, count)}
    moments = {op: float(held[op]) + size for op, size in gradients.items()}
    best = max(moments, key=moments.__getitem__)
    alive = [root for root in roots if root.until is None or root.until <= best]
    return list(_cells(layers, alive)), gradients[best]


def _layers(graph: Graph) -> list[tuple[object, int]]:
    """The layer of every operator, if it is in one, and how many operators it stands for."""
    found: list[tuple[object, int]] = [(None, 1)] * len(graph.ops)
    for number, repeat in enumerate(graph.repeats):
        for period in range(repeat.traced):
            times = 1 + (repeat.missing if period == MODEL else 0)
            for op in repeat.ops(period):
                found[op] = ((number, period), times)
    return found


def _cells(layers: Sequence[tuple[object, int]], roots: Sequence[Root]) -> Iterator[Cell]:
    """The roots by layer. Outside of layers nothing is said of what runs again."""
    for layer, times in dict.fromkeys(layers):
        made = []
        for root in roots:
            if layers[root.writer][0] == layer:
                inside = tuple(op for op in root.readers if layers[op][0] == layer)
                made.append(replace(root, readers=inside if layer is not None else ()))
        entering = []
        for root in roots if layer is not None else ():
            inside = tuple(op for op in root.readers if layers[op][0] == layer)
            homes = [layers[op][0] for op in root.readers if layers[op][0] is not None]
            is_first = bool(homes) and homes[0] == layer  # of several layers one answers for it
            if layers[root.writer][0] != layer and inside and is_first:
                entering.append(replace(root, readers=inside))
        yield Cell(times, tuple(made), tuple(entering))


def _roots(graph: Graph, subdims: Subdims, devices: float) -> list[Root]:
    views, writer = aliases(graph, subdims), graph.writers()
    size: dict[int, float] = {}
    readers: dict[int, list[int]] = {}
    until: dict[int, int] = {}

    def root_of(tensor: int) -> int | None:
        while tensor in views:
            tensor = views[tensor]
        return tensor if tensor in writer else None

    for index, op in enumerate(graph.ops):
        saved = {op.inputs[k] for k in kept_operands(graph, subdims, index)}
        if keeps_results(graph, subdims, index):
            saved.update(tensor for tensor in op.results if tensor not in views)
        for tensor in (*op.inputs, *op.results):
            root = root_of(tensor)
            if root is None or graph.tensors[tensor].role != "activation":
                continue
            least = graph.tensors[tensor].type.bytes / devices
            size[root] = min(size.get(root, least), least)
            readers.setdefault(root, [])
            if tensor in op.inputs and not set(op.results) & views.keys():
                readers[root].append(index)
            if tensor in saved:
                until.setdefault(root, index)
    return [
        Root(writer[root][0], size[root], tuple(readers[root]), until.get(root)) for root in size
    ]


def _gradient_bytes(graph: Graph, subdims: Subdims, op: int) -> float:
    """Of the gradients that an operator's backward surely makes, and of those that it reads."""
    if not graph.has_gradient(op):
        return 0.0
    total, readers = 0.0, graph.readers()
    if _makes_gradients(graph, subdims, op):
        made = {t for t in graph.ops[op].inputs if graph.tensors[t].role == "activation"}
        total += sum(graph.tensors[t].type.bytes for t in made if graph.tensors[t].requires_grad)
    for tensor in graph.ops[op].results:
        read_by = [i for i, _ in readers.get(tensor, ())]
        if len(read_by) == 1 and _makes_gradients(graph, subdims, read_by[0]):
            total += graph.tensors[tensor].type.bytes * graph.tensors[tensor].requires_grad
    return total


def _makes_gradients(graph: Graph, subdims: Subdims, op: int) -> bool:
    """Whether it takes memory for them, and does not hand on what it is given."""
    return graph.has_gradient(op) and not subdims.rules[op].rule.operator.passes_gradient
