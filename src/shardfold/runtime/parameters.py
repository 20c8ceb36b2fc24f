"""Parameters as DTensors: what each device keeps, and the global tensor that it is a part of.

A split of a whole dim, or of the leading piece of one, is what DTensor calls `Shard`. A split of
an inner piece (the heads of a packed q-k-v projection, of which every device has some rows of each
third) is not: such a parameter is kept in the shape of its pieces, 3 x heads x features, where it
is. Optimizers that work element by element do not notice; state dicts have the model's own shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardfold.runtime.lower import Stored


@dataclass(frozen=True, slots=True)
class Keeping:
    """How one parameter is kept: a shape and a placement on every mesh axis."""

    stored: Stored
    shape: tuple[int, ...]  # of the whole, as DTensor sees it
    local: tuple[int, ...]  # of this device's part
    placements: tuple[Any, ...]

    @property
    def in_pieces(self) -> bool:
        """Whether the shape is that of the pieces, not of the dims."""
        return self.shape != self.stored.extent.whole

    def part(self, whole: Tensor) -> Tensor:
        """Take this device's part of a whole tensor, in the shape in which it is kept."""
        extent = self.stored.extent
        local = whole.reshape(extent.subdims)
        for atom, (low, high) in enumerate(extent.bounds):
            local = local.narrow(atom, low, high - low)
        return local.reshape(self.local).clone(memory_format=torch.contiguous_format)

    def parameter(self, local: Tensor, mesh: Any, requires_grad: bool) -> nn.Parameter:
        """The parameter itself; without a mesh (one device) a plain one."""
        return nn.Parameter(self.wrapped(local, mesh), requires_grad=requires_grad)

    def wrapped(self, local: Tensor, mesh: Any) -> Tensor:
        """The local part as a part of the whole."""
        if mesh is None:
            return local
        strides = [math.prod(self.shape[k + 1 :]) for k in range(len(self.shape))]
        found: Tensor = DTensor.from_local(
            local,
            mesh,
            list(self.placements),
            run_check=False,
            shape=torch.Size(self.shape),
            stride=tuple(strides),
        )
        return found

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole tensor in the model's own shape, on every device."""
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return full.reshape(self.stored.extent.whole)


def keeping(stored: Stored) -> Keeping:
    """The shape and placements of a parameter's storage."""
    extent = stored.extent
    by_dims = all(_is_dim_split(stored, axis) for axis in range(len(stored.row)))
    placements = tuple(
        Replicate() if state < 0 else Shard(extent.dims[state] if by_dims else state)
        for state in stored.row
    )
    if by_dims:
        return Keeping(stored, extent.whole, extent.shape, placements)
    return Keeping(stored, extent.subdims, extent.lengths, placements)


def _is_dim_split(stored: Stored, axis: int) -> bool:
    """Whether an axis cuts a dim where DTensor would."""
    state = stored.row[axis]
    if state < 0:
        return True
    extent = stored.extent
    dim = extent.dims[state]
    before = [
        n for n, d in zip(extent.subdims[:state], extent.dims[:state], strict=True) if d == dim
    ]
    parts = math.prod(n for n, s in zip(stored.mesh, stored.row, strict=True) if s == state)
    inner = [
        n
        for n, d in zip(extent.subdims[state + 1 :], extent.dims[state + 1 :], strict=True)
        if d == dim
    ]
    others = any(s >= 0 and s != state and extent.dims[s] == dim for s in stored.row)
    is_even = extent.subdims[state] % parts == 0 or math.prod(inner) == 1
    return math.prod(before) == 1 and is_even and not others
