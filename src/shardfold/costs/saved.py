"""Saved for backward: which decision pays for the memory of each saved tensor.

A tensor is kept because an operator that reads it, or the one that writes it, needs it for its
gradient. It is counted once: where its layout is decided if it has several readers, at its
reader if that keeps it, else at its writer. A region that is run again keeps what it reads from
outside, as it lies there, and nothing that it makes itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardfold.cluster import Mesh
from shardfold.costs.memory_format import access_of
from shardfold.costs.operator_steps import Tensors, operand_local_bytes, result_bytes
from shardfold.costs.recompute import KEEP_ALL, Regions
from shardfold.costs.steps import Values
from shardfold.graph import Graph
from shardfold.operators import Call, Extra
from shardfold.sharding import Space, Subdims


@dataclass(frozen=True, slots=True)
class Kept:
    """What an operator answers for: some of its operands, and perhaps its result."""

    operands: tuple[int, ...] = ()
    result: bool = False


class Saved:
    """Who keeps what, for one graph."""

    def __init__(self, graph: Graph, subdims: Subdims, regions: Regions = KEEP_ALL) -> None:
        self.graph, self.subdims, self.regions = graph, subdims, regions
        self.readers = graph.readers()
        self.writer = {t: i for i, op in enumerate(graph.ops) for t in op.results}

    def by_operator(self, index: int) -> Kept:
        """What the operator at `index` answers for."""
        op, rule = self.graph.ops[index], self.subdims.rules[index].rule
        if not self._has_gradient(index):
            return Kept()
        recomputed = self.regions.of(index) is not None
        operands = tuple(
            k
            for k in (() if recomputed else rule.saves)
            if self.graph.tensors[op.inputs[k]].role == "activation"
            and len(self.readers[op.inputs[k]]) == 1
        )
        several = len(self.readers.get(op.results[0], ())) > 1
        elsewhere = several or self.by_reader(op.results[0])
        entering = not several and any(self._enters(t) for t in op.results)
        result = rule.saves_results and not elsewhere and not recomputed
        return Kept(operands, result or entering)

    def by_reader(self, tensor: int) -> bool:
        """Whether an operator that reads the tensor keeps it, or a region that it enters."""
        return self._enters(tensor) or any(
            k in self.subdims.rules[i].rule.saves
            and self._has_gradient(i)
            and self.regions.of(i) is None
            for i, k in self.readers.get(tensor, ())
        )

    def by_anyone(self, tensor: int) -> bool:
        """Whether a reader or the writer keeps the tensor."""
        writer = self.writer[tensor]
        writes = self.subdims.rules[writer].rule.saves_results and self.regions.of(writer) is None
        return writes or self.by_reader(tensor)

    def _enters(self, tensor: int) -> bool:
        """Whether a region that is run again reads the tensor from outside."""
        if not self.regions or tensor not in self.writer:
            return False
        home = self.regions.of(self.writer[tensor])
        reading = {self.regions.of(i) for i, _ in self.readers.get(tensor, ())}
        return bool(reading - {None, home})

    def _has_gradient(self, index: int) -> bool:
        return any(self.graph.tensors[t].requires_grad for t in self.graph.ops[index].results)


def saved_bytes(space: Space, tensors: Tensors, kept: Kept, mesh: Mesh) -> Values:
    """Bytes that each configuration keeps until backward, on the fullest device."""
    memory = np.zeros(len(space.configs))
    for k in kept.operands:
        memory += operand_local_bytes(space, k, tensors.inputs[k], tensors.input_atoms[k], mesh)
    return memory + result_bytes(space, tensors, mesh) if kept.result else memory


def kept_operands(graph: Graph, subdims: Subdims, index: int) -> tuple[int, ...]:
    """The operands that autograd really keeps for the backward of an operator.

    One that only the gradients of others need is kept where one of those flows.
    """
    op, rule = graph.ops[index], subdims.rules[index].rule
    if not any(graph.tensors[t].requires_grad for t in op.results):
        return ()
    flows = [graph.tensors[t].requires_grad for t in op.inputs]
    return tuple(
        k
        for k in rule.saves
        if op.operands[k].name not in rule.operator.remakes
        and (k not in rule.crossed or any(flows[:k] + flows[k + 1 :]))
    )


def keeps_results(graph: Graph, subdims: Subdims, index: int) -> bool:
    """Whether autograd keeps what the operator leaves, not only something made beside it."""
    rule = subdims.rules[index].rule
    flows = any(graph.tensors[t].requires_grad for t in graph.ops[index].results)
    return flows and rule.saves_results and not rule.operator.saves_beside


def extras(graph: Graph, subdims: Subdims, index: int) -> tuple[Extra, ...]:
    """What an operator makes for its backward beside its results."""
    op, operator = graph.ops[index], subdims.rules[index].rule.operator
    if not any(graph.tensors[t].requires_grad for t in op.results):
        return ()
    return operator.extras(Call.of(graph, op), access_of(graph, subdims, index))
