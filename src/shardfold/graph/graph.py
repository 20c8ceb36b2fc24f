"""The graph of one training step's forward pass, from inputs and parameters to the loss.

A tensor has a type, a role, and a gradient or none; an operator says what is called, on which
tensors, and where in the user's model it came from.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any, Literal

from shardfold.graph.precision import OWN, Precision
from shardfold.graph.repeats import Repeat, records

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8": 1,  # of products, in either kind
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "tf32": 4,
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


Dims = tuple[tuple[tuple[str, ...], ...], ...]  # per tensor and dim: its factors, major first


@dataclass(frozen=True, slots=True)
class Splits:
    """How one call can be split, as found by running it in parts.

    Results that lack a factor are sums of the parts' results, or means if it is one of `means`.
    """

    operands: Dims
    results: Dims
    sizes: tuple[tuple[str, int], ...]
    whole: frozenset[str] = frozenset()  # factors that only fill a dim
    ranges: frozenset[str] = frozenset()  # factors whose parts must be ranges
    means: frozenset[str] = frozenset()
    linear: tuple[int, ...] = ()  # operands that may be sums not yet made
    saves: tuple[int, ...] = ()  # operands that autograd keeps
    saves_results: bool = False


@dataclass(frozen=True, slots=True)
class Op:
    """One call of an operator.

    `kind` is the operator's name without its overload (`aten.linear`), `attributes` are its
    other arguments by schema name, with defaults filled in. `splits` are there if no rule
    describes the kind, and an experiment found some.
    """

    name: str
    kind: str
    operands: tuple[Operand, ...]
    results: tuple[int, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    origin: Origin = Origin()
    splits: Splits | None = field(default=None, compare=False, repr=False)
    inputs: tuple[int, ...] = field(init=False, compare=False, repr=False)  # operands' tensors

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(operand.tensor for operand in self.operands))


@dataclass(frozen=True)
class Graph:
    """Operators in execution order over a list of tensors; `loss` is the tensor to minimise."""

    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    loss: int
    notes: tuple[str, ...] = ()  # what capture has to say; not part of what is computed
    repeats: tuple[Repeat, ...] = ()  # runs of periods of which only a few are in `ops`
    precision: Precision = OWN  # how parameters are kept between steps
    is_compiled: bool = False  # the step is what torch.compile makes of it

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
        return self._readers

    @cached_property
    def _readers(self) -> dict[int, list[tuple[int, int]]]:
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

    def kept_type(self, tensor: int) -> TensorType:
        """A parameter as it is kept between steps: in the dtype of its master weights."""
        kind = self.tensors[tensor].type
        return TensorType(kind.shape, self.precision.kept(kind))

    def is_cast(self, tensor: int) -> bool:
        """Whether a parameter is kept in another dtype than it is used in."""
        return self.kept_type(tensor).dtype != self.tensors[tensor].type.dtype

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


def shared_prefix(paths: Iterable[str]) -> int:
    """How many leading names all paths share: a wrapper's name says nothing."""
    split = [path.split(".") for path in paths if path]
    depth = 0
    while True:
        heads = {tuple(parts[: depth + 1]) for parts in split}
        inner = {parts[depth + 1] for parts in split if len(parts) > depth + 1}
        if len(heads) != 1 or not inner or any(name.isdigit() for name in inner):
            return depth
        depth += 1


def without(path: str, names: int) -> str:
    """A path without some leading names; nothing where it has no more than those.

    >>> without("model.model.layers.0.mlp", 1)
    'model.layers.0.mlp'
    """
    return ".".join(path.split(".")[names:])


def depth(path: str) -> int:
    """How many leading names may be left out: those before the last, and before any number.

    >>> depth("model.model.layers.0.mlp"), depth("model.lm_head"), depth("fc")
    (2, 1, 0)
    """
    names = list(takewhile(lambda name: not name.isdigit(), path.split(".")))
    return max(len(names) - 1, 0)
