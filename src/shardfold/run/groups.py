"""Process groups by mesh axes, and the collectives on them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold.run.parts import Place

Axes = tuple[int, ...]

# Torch renames these; the old names warn where the new ones exist.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
SCATTER = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)


@dataclass(slots=True)
class Groups:
    """The group of this device for each set of axes; made by all processes together."""

    place: Place
    by_axes: dict[Axes, Any] = field(default_factory=dict)

    def make(self, wanted: Iterable[Axes]) -> None:
        """Make the groups for these sets of axes, in an order that all processes share."""
        for axes in sorted(set(wanted) - set(self.by_axes)):
            if len(axes) == len(self.place.shape):
                self.by_axes[axes] = dist.group.WORLD
                continue
            rest = [
                range(n) if axis not in axes else range(1)
                for axis, n in enumerate(self.place.shape)
            ]
            ranks = [
                [self.place.rank(at) for at in Place(self.place.shape, start).members(axes)]
                for start in product(*rest)
            ]
            self.by_axes[axes], _ = dist.new_subgroups_by_enumeration(ranks)

    def all_reduce(self, tensor: Tensor, axes: Axes, *, most: bool = False) -> Tensor:
        """The sum (or the maximum) over the group; the tensor itself is written to."""
        op = dist.ReduceOp.MAX if most else dist.ReduceOp.SUM
        dist.all_reduce(tensor, op=op, group=self.by_axes[axes])
        return tensor

    def all_gather(self, tensor: Tensor, axes: Axes, members: int) -> Tensor:
        """Everyone's tensor, stacked along a new first dim."""
        found = tensor.new_empty((members, *tensor.shape))
        gather = getattr(dist, GATHER)
        gather(found.view(-1), tensor.contiguous().view(-1), group=self.by_axes[axes])
        return found

    def reduce_scatter(self, stacked: Tensor, axes: Axes) -> Tensor:
        """The sum of everyone's row that is this device's."""
        found = stacked.new_empty(stacked.shape[1:])
        scatter = getattr(dist, SCATTER)
        scatter(found.view(-1), stacked.contiguous().view(-1), group=self.by_axes[axes])
        return found

    def all_to_all(self, sent: list[Tensor], counts: list[int], axes: Axes) -> list[Tensor]:
        """Send the k-th tensor to the k-th member; `counts` elements come from each."""
        flat = torch.cat([piece.reshape(-1) for piece in sent])
        found = flat.new_empty(sum(counts))
        dist.all_to_all_single(
            found, flat, counts, [piece.numel() for piece in sent], group=self.by_axes[axes]
        )
        return list(found.split(counts))
