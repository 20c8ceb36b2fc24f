"""Tensors as the planner sees them: a type, a role, and whether a gradient flows back.

Operators: what is called, on which tensors, and where in the user's model it came from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}

Role = Literal["input", "parameter", "buffer", "activation"]


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and dtype of a tensor.

    >>> TensorType((64, 512), "bfloat16").bytes
    65536
    """

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"Unknown dtype {self.dtype!r}; known: {', '.join(ITEM_BYTES)}.")

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.item_bytes

    @property
    def is_floating(self) -> bool:
        """Whether a gradient could flow through values of this dtype."""
        return self.dtype.startswith(("float", "bfloat", "complex"))

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One value of the graph. A tied weight is one tensor; `names` holds all its names."""

    names: tuple[str, ...]
    type: TensorType
    role: Role
    requires_grad: bool = False

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]


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
