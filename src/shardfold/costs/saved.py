"""Which decision answers for the memory of a tensor that backward needs again.

A tensor is kept because an operator that reads it, or the one that writes it, needs it for its
gradient. It is counted once: where its layout is decided if it has several readers, at its
reader if that keeps it, else at its writer. A region that is run again keeps what it reads from
outside, as it lies there, and nothing that it makes itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from shardfold.cluster import Mesh
from shardfold.costs.memory_format import DROPOUTS, drops_nothing
from shardfold.costs.operator_steps import Tensors, operand_local_bytes, result_bytes
from shardfold.costs.recompute import KEEP_ALL, Regions
from shardfold.costs.steps import Values
from shardfold.graph import Graph, Op
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


# Products: an operand is kept for the gradients of the others, so only where one flows.
PRODUCTS = frozenset(
    "mul linear mm bmm mv dot outer matmul einsum addmm baddbmm conv1d conv2d conv3d "
    "conv_transpose1d conv_transpose2d conv_transpose3d expert_linear".split()
)


WIDE_BYTES = 4  # of an item of statistics, at least
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def kept_operands(graph: Graph, subdims: Subdims, index: int) -> tuple[int, ...]:
    """The operands that autograd really keeps for the backward of an operator."""
    op, rule = graph.ops[index], subdims.rules[index].rule
    if not any(graph.tensors[t].requires_grad for t in op.results):
        return ()
    name = op.kind.rpartition(".")[2]
    if name == "cross_entropy_loss":  # keeps the logarithms that it makes, not what it reads
        return tuple(k for k in rule.saves if op.operands[k].name != "self")
    if name not in PRODUCTS:
        return rule.saves
    return tuple(
        k
        for k in rule.saves
        if any(graph.tensors[t].requires_grad for j, t in enumerate(op.inputs) if j != k)
    )


def keeps_results(graph: Graph, subdims: Subdims, index: int) -> bool:
    """Whether autograd keeps what the operator leaves, not only something made beside it."""
    op = graph.ops[index]
    name = op.kind.rpartition(".")[2]
    flows = any(graph.tensors[t].requires_grad for t in op.results)
    beside = name in DROPOUTS or name.startswith(("max_pool", "adaptive_max_pool"))
    return flows and subdims.rules[index].rule.saves_results and not beside


@dataclass(frozen=True, slots=True)
class Extra:
    """Memory of an operator that is no tensor of the graph, per item of a tensor of its own.

    `of` is an operand (or the result, -1) and `per_item` bytes for each of its items; where
    `over` is given, only for each row of that many trailing dims. It is kept until backward, or
    taken for as long as a pass takes. With a `factor` it is only there where that is split, or
    only where it is whole.
    """

    of: int
    per_item: float
    over: int = 0
    life: Literal["kept", "forward", "backward"] = "kept"
    factor: str = ""
    is_split: bool = True


def extras(graph: Graph, index: int) -> tuple[Extra, ...]:
    """What an operator makes for its backward beside its results."""
    op = graph.ops[index]
    name = op.kind.rpartition(".")[2]
    if not any(graph.tensors[t].requires_grad for t in op.results):
        return ()
    item_bytes = graph.tensors[op.inputs[0]].type.item_bytes if op.inputs else 0
    if name in DROPOUTS:
        return () if drops_nothing(op) else (Extra(-1, 1.0),)  # the mask
    if name in ("layer_norm", "native_layer_norm"):
        return (Extra(0, 8.0, len(op.attributes["normalized_shape"])),)  # mean and deviation
    if name in ("rms_norm", "_fused_rms_norm"):
        return (Extra(0, 4.0, len(op.attributes["normalized_shape"])),)
    if "batch_norm" in name:
        return (Extra(_named(op, "weight"), 8.0),) if _is_training(op) else ()
    if name == "scaled_dot_product_attention":
        return (Extra(-1, 4.0, 1),)  # the logarithm of each row's sum
    if name == "cross_entropy_loss":
        picked = not graph.tensors[op.inputs[1]].type.is_floating
        count = (Extra(-1, float(item_bytes)),) if picked and op.attributes["reduction"] else ()
        return (Extra(0, item_bytes), *_of_classes(item_bytes), *count)
    if name == "expert_linear":
        return _of_experts(graph, op)
    if name.startswith(("max_pool", "adaptive_max_pool")) and len(op.results) == 1:
        return (Extra(-1, 8.0),)  # where each maximum was
    if name in GATES:  # gates and states of every step, as a fused kernel reserves them
        layers = op.attributes.get("num_layers", 1)
        return (Extra(-1, float((GATES[name] + 2) * layers * item_bytes)),)
    return ()


def _of_classes(item_bytes: int) -> tuple[Extra, ...]:
    """What cross-entropy takes for a while, beside as much as its logits that it keeps.

    Backward on one device makes the gradient of the logarithms first. With the classes in parts,
    shares are made in float32: those of float32 logits are what is kept, and then the gradient.
    """
    whole = Extra(0, float(item_bytes), life="backward", factor="c", is_split=False)
    if item_bytes >= WIDE_BYTES:
        return (whole,)
    passing = Extra(0, float(WIDE_BYTES - item_bytes), life="forward", factor="c")
    return (whole, passing, Extra(0, float(WIDE_BYTES), life="backward", factor="c"))


def _of_experts(graph: Graph, op: Op) -> tuple[Extra, ...]:
    """Copies of the rows in the experts' order, of operand and result, in either pass."""
    given, result = (graph.tensors[t].type.item_bytes for t in (op.inputs[0], op.results[0]))
    writer = next((o for o in graph.ops if op.inputs[0] in o.results), None)
    is_spread = writer is not None and writer.kind.startswith("aten.expand")
    copies = given * (2.0 if is_spread else 1.0)  # what is read several times is written out first
    return tuple(
        Extra(of, float(size), life=life)
        for life in ("forward", "backward")
        for of, size in ((0, copies), (-1, result))
    )


def _is_training(op: Op) -> bool:
    named = any(operand.name == "weight" for operand in op.operands)
    return named and bool(op.attributes.get("training", True))


def _named(op: Op, name: str) -> int:
    return next(k for k, operand in enumerate(op.operands) if operand.name == name)
