"""The kernels of an operator, forward and backward: which family, and how large on one device.

PyTorch runs an operator as a few kernels, and its gradient as a few others. A linear layer is one
product forward and two backward, one of the transposed input; a product of two tensors is one pass
over memory forward, and one for each operand backward, followed by a sum where it was broadcast.
Here are the kernels that several operators share; those of one family stand with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardfold.graph import TensorType

Values = NDArray[np.float64]  # an entry for each configuration


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of a family in a dtype, with an entry of each size for every case."""

    family: str
    dtype: str
    sizes: tuple[Values, ...]
    times: float | Values = 1.0
    is_awaited: bool = False  # the host goes on when it has what the kernel found
    is_grouped: bool = False  # one kernel may do all `times`, where the device has such a kernel


@dataclass(frozen=True, slots=True)
class Fused:
    """Of an operator that a compiler puts together with others: what it bears of their traffic.

    Bytes of whole tensors, and kernels; nothing where another operator of the group bears it.
    """

    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    forward_kernels: float = 0.0
    backward_kernels: float = 0.0


@dataclass(frozen=True, slots=True)
class Access:
    """One call's kind and arguments, and how it meets memory: found once for a whole graph."""

    kind: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    is_idle: bool = False  # a dropout of nothing: no kernel at all
    copies: bool = False  # a view that must move its elements
    is_strided: bool = False
    adds: tuple[float, ...] = ()  # per operand: additions of its gradient to other readers'
    is_shared: bool = False  # an operator before has done what both need
    is_across: bool = False  # what is copied or read by strides has other neighbours in memory
    copies_gradient: bool = False  # its result's gradient lies in an order that it cannot read
    is_gradient_strided: bool = False
    is_gradient_across: bool = False
    is_channels_last: bool = False  # of the first operand
    is_compiled: bool = False
    is_float8: bool = False  # its products are
    fused: Fused | None = None  # of a compiled step: None for a kernel of its own


class LocalWork(Protocol):
    """A call under each of its configurations, in local sizes on the fullest device."""

    @property
    def access(self) -> Access:
        """How the call meets memory."""

    @property
    def inputs(self) -> tuple[TensorType, ...]:
        """The operands, whole."""

    @property
    def results(self) -> tuple[TensorType, ...]:
        """The results, whole."""

    @property
    def float_dtypes(self) -> tuple[str, ...]:
        """The dtypes of operands and results that are no integers."""

    @property
    def dtype(self) -> str:
        """The dtype of the first operand that is no integer."""

    @property
    def trained(self) -> tuple[int, ...]:
        """The positions of operands that need a gradient."""

    def operand_items(self, k: int) -> Values:
        """The elements of one operand."""

    def operand_bytes(self, k: int) -> Values:
        """The bytes of one operand."""

    def read_bytes(self) -> Values:
        """The bytes that are read: of a table that is looked up, only the rows read."""

    def result_items(self, k: int) -> Values:
        """The elements of one result."""

    def result_bytes(self, k: int) -> Values:
        """The bytes of one result."""

    def parts(self, base: str) -> Values:
        """Into how many parts a factor is split."""

    def parts_alone(self, base: str) -> Values:
        """Into how many parts a factor is split by itself, not together with another."""

    def factor(self, base: str) -> Values:
        """The points of one of the rule's factors; 1 if it has none."""

    def points(self, *bases: str) -> Values:
        """The points of several factors together: of rows and experts, the rows routed here."""

    def last_dim(self) -> Values:
        """The points of the first operand's last dim."""


KernelMaker: TypeAlias = Callable[[LocalWork, str], list[Kernel]]


def memory_pass(size: Values, dtype: str, family: str = "vector") -> Kernel:
    """One pass over so many bytes."""
    return Kernel(family, dtype, (size,))


def reordered(size: Values, dtype: str, *, across: bool) -> Kernel:
    """So many bytes put in another order; across rows, if neighbours do not stay neighbours."""
    return memory_pass(2.0 * size, dtype, "strided.across" if across else "strided")


def way(phase: str) -> str:
    """The pass that a kernel is measured in; what is recomputed runs as forward does."""
    return "backward" if phase == "backward" else "forward"


def elementwise_pass(
    work: LocalWork, size: Values, whole: Values, *, strided: bool, across: bool
) -> Kernel:
    """An elementwise kernel, by how its operands lie and what they are.

    Read across, an element costs as much whatever else is read: `whole` is the result's bytes.
    """
    wide = {k.dtype for k in work.inputs if k.is_floating and math.prod(k.shape) > 1}
    if strided and across:
        return reordered(whole, work.results[0].dtype, across=True)
    if strided:
        family = "strided.mixed" if len(wide) > 1 else "strided"
    else:
        family = (
            "mixed" if len(wide) > 1 else "cast" if len(set(work.float_dtypes)) > 1 else "vector"
        )
    return memory_pass(size, work.dtype, family)


def broadcast_sum(work: LocalWork, k: int) -> list[Kernel]:
    """The sum of a gradient over what operand `k` was broadcast along."""
    whole, part = work.result_items(0), work.operand_items(k)
    if np.all(part >= whole):
        return []
    shape, full = work.inputs[k].shape, work.results[0].shape
    return [sum_kernel(work.results[0].dtype, whole, part, bool(shape) and shape[-1] == full[-1])]


def sum_kernel(dtype: str, whole: Values, part: Values, keeps_last: bool) -> Kernel:
    """The sum of `whole` elements to `part` of them."""
    if keeps_last:
        return Kernel("sum_columns", dtype, (whole / part, part))
    return Kernel("sum_rows", dtype, (part, whole / part))


def pointwise(work: LocalWork, phase: str) -> list[Kernel]:
    """One pass; backward, the gradient and what was kept are read, and one result written."""
    access, whole = work.access, work.result_bytes(0)
    if phase != "backward":
        size, lies = work.read_bytes() + whole, (access.is_strided, access.is_across)
        return [elementwise_pass(work, size, whole, strided=lies[0], across=lies[1])]
    strided = access.is_strided or access.is_gradient_strided
    across = access.is_across or access.is_gradient_across
    found = elementwise_pass(work, 3.0 * whole, whole, strided=strided, across=across)
    return [found] * min(1, len(work.trained))


def copied(work: LocalWork, phase: str) -> list[Kernel]:
    """A view is free, unless it has to move its elements."""
    if not work.access.copies or phase == "backward":
        return []
    return [reordered(work.result_bytes(0), work.dtype, across=work.access.is_across)]


def rows(family: str) -> KernelMaker:
    """A kernel that works on each row of the first operand's last dim, in the result's dtype.

    An operand of another dtype is converted first, its gradient last.
    """

    def make(work: LocalWork, phase: str) -> list[Kernel]:
        wide = work.last_dim()
        before, after = work.inputs[0].dtype, work.results[0].dtype
        found = [Kernel(f"{family}.{way(phase)}", after, (work.operand_items(0) / wide, wide))]
        if before != after:
            size = work.operand_bytes(0) + work.result_bytes(0)
            found.append(memory_pass(size, after if phase == "backward" else before, "cast"))
        return found

    return make
