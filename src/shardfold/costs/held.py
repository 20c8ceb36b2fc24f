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
from dataclasses import dataclass

import numpy as np

from shardfold.cluster import Mesh
from shardfold.costs.activations import keeps_results, kept_operands
from shardfold.costs.memory_format import aliases
from shardfold.costs.parameters import Optimizer
from shardfold.costs.steps import Values
from shardfold.costs.tables import Tables
from shardfold.graph import Graph
from shardfold.graph.repeats import MODEL
from shardfold.sharding import Subdims
from shardfold.sharding.layouts import forward_states, local_items

MOMENTS = 2  # as forward ends or soon after, as backward ends


@dataclass(frozen=True, slots=True)
class KeptBy:
    """What a device keeps of an operator's results, at least, until backward."""

    op: int
    bytes: float
    times: int  # how many operators of the model it stands for


class Held:
    """The bytes of a graph on a mesh at both moments."""

    def __init__(
        self, graph: Graph, subdims: Subdims, tables: Tables, optimizer: Optimizer, workspace: int
    ) -> None:
        self.graph, self.subdims, self.tables = graph, subdims, tables
        self.optimizer = optimizer
        self.kept, gradients = early_in_backward(graph, subdims, tables.mesh)
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
        flows = any(
            self.graph.has_gradient(op)
            for op, each in enumerate(self.graph.ops)
            if vertex.index in each.inputs
        )
        alone = self.tables.micro_batches == 1 and flows
        return np.array([size * always, size * (always + alone)])


@dataclass(frozen=True, slots=True)
class _Root:
    """A tensor whose memory autograd keeps, under its own name or that of a view."""

    writer: int
    bytes: float
    until: int  # the operator whose backward is the last that needs it


def early_in_backward(graph: Graph, subdims: Subdims, mesh: Mesh) -> tuple[list[KeptBy], float]:
    """What is kept at the fullest early moment, by writer, and the gradients beside it."""
    devices = float(math.prod(mesh.shape))
    stands = {op: 1 + each.missing for each in graph.repeats for op in each.ops(MODEL)}
    roots = _roots(graph, subdims, devices)

    def held(at: int) -> float:
        return sum(r.bytes * stands.get(r.writer, 1) for r in roots if r.until <= at)

    moments = {len(graph.ops): held(len(graph.ops))}
    gradients = {len(graph.ops): 0.0}
    for op in range(max((each.end for each in graph.repeats), default=0), len(graph.ops)):
        gradients[op] = _gradient_bytes(graph, subdims, op) / devices
        moments[op] = held(op) + gradients[op]
    best = max(moments, key=moments.__getitem__)
    kept: dict[int, float] = {}
    for root in roots:
        if root.until <= best:
            kept[root.writer] = kept.get(root.writer, 0.0) + root.bytes
    found = [KeptBy(op, size, stands.get(op, 1)) for op, size in kept.items()]
    return found, gradients[best]


def _roots(graph: Graph, subdims: Subdims, devices: float) -> list[_Root]:
    views, writer = aliases(graph, subdims), graph.writers()
    found: dict[int, _Root] = {}
    for index, op in enumerate(graph.ops):
        kept = [op.inputs[k] for k in kept_operands(graph, subdims, index)]
        if keeps_results(graph, subdims, index):
            kept += [tensor for tensor in op.results if tensor not in views]
        for tensor in kept:
            root = tensor
            while root in views:
                root = views[root]
            if root in writer and graph.tensors[tensor].role == "activation":
                size = min(graph.tensors[t].type.bytes for t in (root, tensor)) / devices
                known = found.get(root)
                size = size if known is None else min(size, known.bytes)
                until = index if known is None else known.until
                found[root] = _Root(writer[root][0], size, until)
    return list(found.values())


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
