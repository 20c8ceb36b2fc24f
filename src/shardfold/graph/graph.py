"""The graph of one training step's forward pass, from inputs and parameters to the loss."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from shardfold.graph.repeats import Repeat, records
from shardfold.graph.values import Op, Tensor


@dataclass(frozen=True, slots=True)
class Graph:
    """Operators in execution order over a list of tensors; `loss` is the tensor to minimise."""

    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    loss: int
    notes: tuple[str, ...] = ()  # what capture has to say; not part of what is computed
    repeats: tuple[Repeat, ...] = ()  # runs of periods of which only a few are in `ops`

    def __post_init__(self) -> None:
        known = {i for i, t in enumerate(self.tensors) if t.role != "activation"}
        for op in self.ops:
            missing = [t for t in op.inputs if t not in known]
            if missing:
                names = [self.tensors[t].name for t in missing]
                raise ValueError(f"Operator {op.name} reads {names} before any operator writes it.")
            known.update(op.results)
        if self.loss not in known:
            raise ValueError(f"The loss {self.tensors[self.loss].name} is computed by no operator.")

    def readers(self) -> dict[int, list[tuple[int, int]]]:
        """For each tensor that is read: (operator index, operand position) of every reader."""
        found: dict[int, list[tuple[int, int]]] = {}
        for i, op in enumerate(self.ops):
            for k, tensor in enumerate(op.inputs):
                found.setdefault(tensor, []).append((i, k))
        return found

    def writers(self) -> dict[int, tuple[int, int]]:
        """For each tensor that is computed: (operator index, position among its results)."""
        return {t: (i, k) for i, op in enumerate(self.ops) for k, t in enumerate(op.results)}

    def has_gradient(self, op: int) -> bool:
        """Whether a gradient comes back to an operator."""
        return any(self.tensors[t].requires_grad for t in self.ops[op].results)

    def parameters(self) -> list[int]:
        """Indices of the parameters."""
        return [i for i, t in enumerate(self.tensors) if t.role == "parameter"]

    def digest(self) -> str:
        """A fingerprint of what is computed: operators, shapes, dtypes, constants and wiring.

        It does not depend on how tensors are numbered, nor on how much of a run is in the graph.
        """
        text = "\n".join([*records(self), str(self.loss_place())])
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    def loss_place(self) -> tuple[int, int]:
        """The loss as (operator from the end, position among its results)."""
        for back, op in enumerate(reversed(self.ops)):
            if self.loss in op.results:
                return back, op.results.index(self.loss)
        return -1, 0

    @property
    def operator_count(self) -> int:
        """How many operators the model has, those left out of a run included."""
        return len(self.ops) + sum(r.missing * r.length for r in self.repeats)
