"""Operators: what is called, on which tensors, and where in the user's model it came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an operator comes from: the module's path and the line of its forward."""

    module: str = ""
    source: str = ""

    def __str__(self) -> str:
        return " ".join(
            filter(None, (self.module or "(model)", self.source and f"({self.source})"))
        )


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument: the parameter's name in the operator's schema, and the tensor's index."""

    name: str
    tensor: int


@dataclass(frozen=True, slots=True)
class Op:
    """One call of an operator.

    `kind` is the operator's name without its overload (`aten.linear`), `attributes` are its
    other arguments by schema name, with defaults filled in.
    """

    name: str
    kind: str
    operands: tuple[Operand, ...]
    results: tuple[int, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    origin: Origin = Origin()
    inputs: tuple[int, ...] = field(init=False, compare=False, repr=False)  # operands' tensors

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(operand.tensor for operand in self.operands))
