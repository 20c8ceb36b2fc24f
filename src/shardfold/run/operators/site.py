"""One operator as one device runs it: its call, its configuration, and the parts it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shardfold.capture import Invocation, Slot
from shardfold.errors import RunError
from shardfold.graph import Op
from shardfold.run.groups import Axes, Groups
from shardfold.run.parts import Bounds, Extent, Place, Row, bounds_of
from shardfold.spaces import AtomicRule

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES)


@dataclass(slots=True)
class Context:
    """What all operators of a step share."""

    groups: Groups
    device: torch.device
    seed: int = 0
    step: int = 0
    double: bool = False  # run in float64 what was captured in a shorter dtype


Local: TypeAlias = Callable[[Sequence[Tensor], Context], Any]


@dataclass(frozen=True, slots=True)
class Site:
    """Everything that the local form of an operator may depend on."""

    number: int
    op: Op
    call: Invocation
    rule: AtomicRule
    config: Row  # per axis the factor that is split, NONE or PASS
    place: Place
    inputs: tuple[Extent, ...]
    results: tuple[Extent, ...]

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument of the call that is not a tensor."""
        value = self.call.arguments.get(name)
        return default if value is None else value

    def position(self, name: str) -> int | None:
        """Where the tensor argument `name` is among the operands, if it was given."""
        value = self.call.arguments.get(name)
        return value.position if isinstance(value, Slot) else None

    @property
    def is_split(self) -> bool:
        """Whether any axis splits a factor."""
        return any(factor >= 0 for factor in self.config)

    @property
    def split(self) -> tuple[str, ...]:
        """The rule's factors (not their pieces) that are split, in the order of the axes."""
        return tuple(dict.fromkeys(self.rule.base(f) for f in self.config if f >= 0))

    def axes(self, *bases: str) -> Axes:
        """The axes that split any of these factors."""
        return tuple(a for a, f in enumerate(self.config) if f >= 0 and self.rule.base(f) in bases)

    def is_first(self, *bases: str) -> bool:
        """Whether this device has the first part of each of these factors."""
        return all(self.place.at[axis] == 0 for axis in self.axes(*bases))

    def part(self, base: str) -> Bounds:
        """The range of a factor that this device has; the factor must be in one piece."""
        bounds = bounds_of(self.rule.sizes, self.config, self.place.shape, self.place.at)
        found = [b for f, b in enumerate(bounds) if self.rule.base(f) == base]
        if len(found) > 1:
            raise self.unsupported(f"{base} is split in {len(found)} pieces")
        return found[0]

    def size(self, base: str) -> int:
        """The whole size of a factor."""
        return self.rule.rule.sizes[base]

    def unsupported(self, why: str = "") -> RunError:
        """The error for a split that the runner cannot do."""
        names = [self.rule.factors[f] if f >= 0 else "-" for f in self.config]
        return RunError(
            f"Operator {self.op.name} ({self.op.kind}, {self.op.origin}) cannot be run with the "
            f"split {' '.join(names)} of {self.rule.rule}{': ' + why if why else ''}. "
            "Plan again with a rule that keeps this factor whole."
        )

    def invoke(self, tensors: Sequence[Tensor], context: Context, **changed: Any) -> Any:
        """Call the operator on local tensors, with some arguments changed."""
        arguments = {
            name: _filled(changed.get(name, value), tensors, context)
            for name, value in self.call.arguments.items()
        }
        schema = self.call.target._schema
        if schema.is_mutable:
            for argument in schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    arguments[argument.name] = arguments[argument.name].clone()
        return self.call.target(**arguments)


def _filled(value: Any, tensors: Sequence[Tensor], context: Context) -> Any:
    if isinstance(value, Slot):
        return tensors[value.position]
    if isinstance(value, list):
        return [_filled(v, tensors, context) for v in value]
    if isinstance(value, torch.device):
        return context.device
    if context.double and isinstance(value, torch.dtype) and value in FLOATS:
        return torch.float64
    return value


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums of rows are kept in at least float32."""
    return torch.float32 if dtype in HALVES else dtype


def summed(context: Context, tensor: Tensor, site: Site, bases: Iterable[str]) -> Tensor:
    """All-reduce over the axes of each factor in turn, as the rule's exchanges say."""
    for base in bases:
        axes = site.axes(base)
        if axes:
            context.groups.all_reduce(tensor, axes)
    return tensor
