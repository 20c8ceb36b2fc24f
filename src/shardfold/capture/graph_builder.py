"""A graph under construction: its tensors, its operators and the calls behind them.

What forward leaves in a buffer or in a frozen parameter ends in an operator of its own,
`shardfold.write`, which the runner carries out after the step. A buffer that only counts up by a
fixed number is an increment of the program instead, and costs nothing. In the end, what neither
the loss nor such a write depends on is pruned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardfold.capture.program import Invocation, Slot, Source
from shardfold.errors import ModelError
from shardfold.graph import Graph, Op, Operand, Origin, Tensor, TensorType
from shardfold.operators import operator_of

WRITE = "shardfold.write"
# Operators that draw random numbers without saying which is for which element.
UNREPEATABLE = frozenset(
    f"aten.{name}"
    for name in (
        *("poisson", "binomial", "native_dropout", "rrelu", "rrelu_with_noise", "random"),
        *("_fused_dropout",),
        *("_standard_gamma", "_sample_dirichlet", "fractional_max_pool2d", "fractional_max_pool3d"),
    )
)


@torch.library.custom_op("shardfold::write", mutates_args=())
def write(buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What forward leaves in a buffer, or in a parameter that is not trained."""
    return value.clone()


@dataclass
class GraphBuilder:
    """What a walk over a trace adds to, tensor by tensor and operator by operator."""

    tensors: list[Tensor] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    calls: list[Invocation] = field(default_factory=list)
    sources: dict[int, Source] = field(default_factory=dict)
    increments: dict[str, float] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)  # names of operators

    def add(self, names: tuple[str, ...], value: torch.Tensor, role: Any, grad: bool) -> int:
        """A further tensor; returns its number."""
        kind = TensorType(tuple(int(n) for n in value.shape), str(value.dtype).split(".")[-1])
        self.tensors.append(Tensor(names, kind, role, grad and kind.is_floating))
        return len(self.tensors) - 1

    def constant(self, name: str, value: torch.Tensor) -> int:
        """A tensor that holds these numbers in every step."""
        index = self.add((name,), value, "buffer", False)
        self.sources[index] = Source("constant", name, value=value)
        return index

    def unused(self, name: str) -> str:
        """The name, or, if an operator has it, one beside it."""
        found, count = name, 1
        while found in self.used:
            count += 1
            found = f"{name}_again{count}"
        self.used.add(found)
        return found

    def leave(self, index: int, value: int, makers: dict[int, Op]) -> None:
        """Give a source another value after forward: an operator that writes, or an increment."""
        source = self.sources.get(index)
        if source is None or source.role == "input":
            name = "an input" if source is None else f"the input {self.tensors[index].name}"
            at = makers.get(value)
            raise ModelError(
                f"Forward writes into {name}{f' ({at.origin})' if at else ''}: whoever gave it "
                "would see it changed. Write into a copy: x = x.clone()."
            )
        if source.role == "constant":
            return
        copied = makers.get(value)
        while copied is not None and copied.kind == "aten.copy":
            new = copied.operands[-1].tensor
            if (
                self.tensors[new].type != self.tensors[index].type
                or self.tensors[new].requires_grad
            ):
                break
            value, copied = new, makers.get(new)
        if self.tensors[value].requires_grad:
            raise ModelError(
                f"Forward leaves a tensor with a gradient in {source.name}: the next step would "
                "go back into this one. Use detach(), or torch.no_grad()."
            )
        added = _added(index, value, makers)
        if added is not None:
            self.increments[source.name] = added
            return
        origin = makers[value].origin if value in makers else Origin()
        name = f"write_{source.name.replace('.', '_')}"
        result = self._add_like(name, value)
        operands = (Operand("buffer", index), Operand("value", value))
        self.ops.append(Op(name, WRITE, operands, (result,), {}, origin))
        arguments = {"buffer": Slot(0), "value": Slot(1)}
        self.calls.append(Invocation(torch.ops.shardfold.write.default, arguments))

    def _add_like(self, name: str, tensor: int) -> int:
        kind = self.tensors[tensor].type
        self.tensors.append(Tensor((name,), kind, "activation", False))
        return len(self.tensors) - 1

    def loss(self, results: list[Any], tree: Any) -> int:
        """The loss among the results of forward; `tree` has them as forward returns them."""
        named = tree.get("loss") if isinstance(tree, dict) else getattr(tree, "loss", None)
        scalars = [v for v in results if isinstance(v, int) and self._is_loss(v)]
        if isinstance(named, int) and named in scalars:
            return named
        if scalars and (len(scalars) == 1 or scalars[0] == results[0]):
            self._check_only(scalars, isinstance(tree, tuple))
            return scalars[0]
        shapes = [str(self.tensors[v].type) for v in results if isinstance(v, int)]
        raise ModelError(
            f"The model returns no loss: its outputs are {', '.join(shapes) or 'empty'}, and "
            "training needs one scalar that depends on the parameters. Return the loss from "
            "forward (Hugging Face models: pass labels=...), or give one: "
            "plan(..., loss=lambda output: ...); in a model file, wrap the module."
        )

    def _check_only(self, scalars: list[int], may_follow: bool) -> None:
        """Refuse further losses that the first one does not contain.

        What a tuple returns after its loss may also be computed from it.
        """
        part_of = self._ancestors(scalars[0])
        for other in scalars[1:]:
            follows = may_follow and scalars[0] in self._ancestors(other)
            if other not in part_of and not follows:
                raise ModelError(
                    f"The model returns {len(scalars)} scalars with a gradient, and the first "
                    f"({self._maker(scalars[0])}) does not contain another ({self._maker(other)}): "
                    "which of them, or which sum, is trained? Return one loss first, or give it: "
                    "plan(..., loss=lambda output: sum(output)); in a model file, wrap the module."
                )

    def _ancestors(self, tensor: int) -> set[int]:
        """A tensor, and all that it is computed from."""
        found = {tensor}
        for op in reversed(self.ops):
            if not found.isdisjoint(op.results):
                found.update(op.inputs)
        return found

    def _maker(self, tensor: int) -> str:
        op = next((op for op in self.ops if tensor in op.results), None)
        return self.tensors[tensor].name if op is None else f"{op.name}, {op.origin}"

    def _is_loss(self, index: int) -> bool:
        tensor = self.tensors[index]
        return tensor.requires_grad and all(n == 1 for n in tensor.type.shape)


def _added(index: int, value: int, makers: dict[int, Op]) -> float | None:
    """The number by which `value` is more than the tensor at `index`, if it is a fixed one."""
    total: float = 0
    while value != index:
        op = makers.get(value)
        if op is None or op.kind != "aten.add" or len(op.operands) != 1:
            return None
        other, alpha = op.attributes.get("other"), op.attributes.get("alpha", 1)
        if isinstance(other, bool) or not isinstance(other, int | float):
            return None
        total += other * alpha
        value = op.operands[0].tensor
    return total


def prune(
    tensors: list[Tensor], ops: list[Op], loss: int
) -> tuple[Graph, dict[int, int], list[int]]:
    """Keep what the loss and written buffers depend on; parameters that are never used stay listed.

    Returns the graph, the new number of each tensor that is kept, and the operators kept.
    """
    needed = {loss, *(r for op in ops if left_by(op, tensors) for r in op.results)}
    kept: list[int] = []
    for i, op in reversed(list(enumerate(ops))):
        if needed.intersection(op.results):
            needed.update(op.inputs)
            kept.append(i)
    kept.reverse()
    needed.update(r for i in kept for r in ops[i].results)
    needed.update(i for i, t in enumerate(tensors) if t.role == "parameter")
    order = _canonical(tensors, ops, kept, needed)
    number = {old: new for new, old in enumerate(order)}
    renumbered = tuple(
        Op(
            op.name,
            op.kind,
            tuple(Operand(o.name, number[o.tensor]) for o in op.operands),
            tuple(number[r] for r in op.results),
            op.attributes,
            op.origin,
        )
        for op in (ops[i] for i in kept)
    )
    graph = Graph(tuple(tensors[i] for i in order), renumbered, number[loss])
    return _without_dead_ends(graph), number, kept


def left_by(op: Op, tensors: Sequence[Tensor]) -> set[int]:
    """The buffers that an operator changes, so that it counts even if nobody reads its result."""
    is_training = op.attributes.get("training", op.attributes.get("use_input_stats", True))
    names = ("buffer",) if op.kind == WRITE else operator_of(op.kind).writes if is_training else ()
    written = {operand.tensor for operand in op.operands if operand.name in names}
    return {index for index in written if tensors[index].role != "activation"}


def _without_dead_ends(graph: Graph) -> Graph:
    """The graph in which a gradient comes back to an activation only if the loss depends on it.

    What only an index, a comparison or a buffer is made of has none, whatever it is made of.
    """
    reached = {graph.loss}
    for op in reversed(graph.ops):
        if any(r in reached and graph.tensors[r].requires_grad for r in op.results):
            reached.update(op.inputs)
    dead = {
        index
        for index, tensor in enumerate(graph.tensors)
        if tensor.role == "activation" and tensor.requires_grad and index not in reached
    }
    tensors = (
        replace(tensor, requires_grad=False) if index in dead else tensor
        for index, tensor in enumerate(graph.tensors)
    )
    return replace(graph, tensors=tuple(tensors)) if dead else graph


def _canonical(
    tensors: list[Tensor], ops: list[Op], kept: list[int], needed: set[int]
) -> list[int]:
    """One order of tensors however the model was traced.

    Parameters and inputs by name, then the others as they are first read or written.
    """
    named = [i for i in needed if tensors[i].role in ("parameter", "input")]
    order = dict.fromkeys(sorted(named, key=lambda i: (tensors[i].role, tensors[i].names)))
    for i in kept:
        order.update(dict.fromkeys((*ops[i].inputs, *ops[i].results)))
    order.update(dict.fromkeys(sorted(needed)))
    return list(order)


def check_random(op: Op) -> None:
    """Refuse what would draw other random numbers on every device."""
    if op.kind in UNREPEATABLE:
        raise ModelError(
            f"Operator {op.name} ({op.kind}, {op.origin}) draws random numbers, which would differ "
            "between devices and from one device. Use torch.rand, randn, randint, bernoulli or "
            "nn.Dropout, or draw outside the model and pass the numbers in."
        )
