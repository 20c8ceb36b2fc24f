"""Tensors as the planner sees them: a type, a role, and whether a gradient flows back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

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
