"""Parameters as DTensors: what each device keeps, and the global tensor that it is a part of.

A parameter has the model's own shape, whatever pieces of its dims are split: who groups parameters
by their dims, or reads a gradient, sees what the model has. A split of a whole dim, or of the
leading piece of one, is what DTensor calls `Shard`. A split of an inner piece (the heads of a
packed q-k-v projection, of which every device has some rows of each third) is a `_StridedShard`:

    3 x 8 heads x 16 features over 2 devices: _StridedShard(0, split_factor=3)

What neither can say (5 heads x 16 features over 2: 3 heads and 2) is stored whole on that axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardfold.runtime.lower import Stored
from shardfold.runtime.shards import pieces_product


@dataclass(frozen=True, slots=True)
class Keeping:
    """How one parameter is kept: its part of the whole, and a placement on every mesh axis."""

    stored: Stored
    placements: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole, which is the model's own."""
        return self.stored.extent.whole

    def part(self, whole: Tensor) -> Tensor:
        """Take this device's part of a whole tensor."""
        extent = self.stored.extent
        local = whole.reshape(extent.subdims)
        for atom, (low, high) in enumerate(extent.bounds):
            local = local.narrow(atom, low, high - low)
        return local.reshape(extent.shape).clone(memory_format=torch.contiguous_format)

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
        """The whole tensor, on every device."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def keeping(stored: Stored) -> Keeping:
    """The placements of a parameter's storage."""
    extent = stored.extent
    found: list[Any] = []
    lengths = list(extent.subdims)
    for axis, state in enumerate(stored.row):
        if state < 0:
            found.append(Replicate())
            continue
        dim = extent.dims[state]
        factor = pieces_product(lengths[:state], extent.dims, dim)
        found.append(_StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim))
        lengths[state] = -(-lengths[state] // stored.mesh[axis])
    return Keeping(stored, tuple(found))
