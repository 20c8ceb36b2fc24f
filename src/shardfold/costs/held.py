"""Bytes that a device surely holds at two moments of a step, whatever else it holds.

As forward ends, it holds the stored parts of parameters, the optimizer's state and what autograd
keeps; as backward ends, parameters, state and gradients. The peak is no less than either. A kept
tensor is held at least as the share that falls to each device, unless its writer is run again in
backward: that takes at least the writer's work. So the bytes of parameters are sums over decisions,
and those of activations a trade of bytes against seconds that no choice of splits escapes.
"""

from __future__ import annotations

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

MOMENTS = 2  # as forward ends, as backward ends


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
        self.fixed = float(workspace) + self._inputs()
        self.stored = [self._stored(v) for v in range(len(tables.vertices))]
        self.kept = kept_at_least(graph, subdims, tables.mesh)

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


def kept_at_least(graph: Graph, subdims: Subdims, mesh: Mesh) -> list[KeptBy]:
    """Of every operator whose results autograd keeps: the share that falls to a device."""
    views, writer = aliases(graph, subdims), graph.writers()
    devices = float(np.prod(mesh.shape)) if mesh.shape else 1.0
    found: dict[int, dict[int, float]] = {}
    for index, op in enumerate(graph.ops):
        kept = [op.inputs[k] for k in kept_operands(graph, subdims, index)]
        if keeps_results(graph, subdims, index):
            kept += [tensor for tensor in op.results if tensor not in views]
        for tensor in kept:
            root = tensor
            while root in views:
                root = views[root]
            if root in writer and graph.tensors[tensor].role == "activation":
                least = min(graph.tensors[t].type.bytes for t in (root, tensor)) / devices
                made = found.setdefault(writer[root][0], {})
                made[root] = min(made.get(root, least), least)
    stands = {op: 1 + repeat.missing for repeat in graph.repeats for op in repeat.ops(MODEL)}
    return [KeptBy(op, sum(sizes.values()), stands.get(op, 1)) for op, sizes in found.items()]
