"""What one rank has of a tensor, as boxes of the whole in the model's own dims.

A shard under our layouts is a range of every sub-dim. Within a dim, the last sub-dim that is split
and all that follow it are one run; the sub-dims before it are stepped through:

    rows of a packed q-k-v weight, 3 x heads x features, heads 0-3 of 8: three runs of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardfold.errors import CheckpointError
from shardfold.runtime.parameters import Keeping
from shardfold.runtime.shards import Bounds, Extent


@dataclass(frozen=True, slots=True)
class Box:
    """A box of the whole, and the local memory that it is."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    tensor: Tensor  # a view, of this shape


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's boxes of a tensor."""

    shape: tuple[int, ...]  # of the whole
    dtype: torch.dtype
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of consecutive places of one dim: where it begins, and the outer sub-dims' places."""

    start: int
    length: int
    outer: tuple[int, ...]


def part_of(tensor: Tensor, keeping: Keeping | None = None) -> Part:
    """The boxes of a plain tensor, of a DTensor, or of one that is kept as `keeping` says."""
    local = _local(tensor)
    if keeping is not None:
        return Part(keeping.stored.extent.whole, local.dtype, _boxes(keeping.stored.extent, local))
    shape = tuple(tensor.shape)
    offset = (0,) * len(shape)
    if isinstance(tensor, DTensor):
        offset = _offset(tensor)
    box = Box(offset, tuple(local.shape), local)
    return Part(shape, local.dtype, (box,) if _has_points(box.shape) else ())


def _local(tensor: Tensor) -> Tensor:
    found: Tensor = tensor.detach()
    return found.to_local() if isinstance(found, DTensor) else found


def _offset(tensor: Any) -> tuple[int, ...]:
    chunks = tensor.__create_chunk_list__()
    if len(chunks) != 1:
        raise CheckpointError(
            f"A DTensor placed as {tensor.placements} has {len(chunks)} pieces on this rank; "
            "checkpoints are written of one piece each."
        )
    return tuple(chunks[0].offsets)


def _boxes(extent: Extent, local: Tensor) -> tuple[Box, ...]:
    if not _has_points(extent.lengths):
        return ()
    by_atoms = local.view(extent.lengths)
    runs = [_runs(extent.pieces(dim)) for dim in range(extent.rank)]
    return tuple(_box(extent, by_atoms, chosen) for chosen in product(*runs))


def _box(extent: Extent, by_atoms: Tensor, chosen: tuple[_Run, ...]) -> Box:
    index: list[int | slice] = []
    for run, dim in zip(chosen, range(extent.rank), strict=True):
        index += run.outer
        index += [slice(None)] * (len(extent.pieces(dim)) - len(run.outer))
    shape = tuple(run.length for run in chosen)
    return Box(tuple(run.start for run in chosen), shape, by_atoms[tuple(index)].view(shape))


def _runs(pieces: list[tuple[int, Bounds]]) -> list[_Run]:
    """The runs of one dim, from its sub-dims (size and local range), major first.

    >>> [(run.start, run.length) for run in _runs([(3, (0, 3)), (8, (4, 8)), (2, (0, 2))])]
    [(8, 8), (24, 8), (40, 8)]
    """
    cut = max((k for k, (size, found) in enumerate(pieces) if found != (0, size)), default=0)
    strides = [math.prod(size for size, _ in pieces[k + 1 :]) for k in range(len(pieces))]
    low, high = pieces[cut][1]
    return [
        _Run(
            sum(k * stride for k, stride in zip(places, strides, strict=False))
            + low * strides[cut],
            (high - low) * strides[cut],
            tuple(k - first for k, (_, (first, _)) in zip(places, pieces, strict=False)),
        )
        for places in product(*(range(*bounds) for _, bounds in pieces[:cut]))
    ]


def _has_points(shape: tuple[int, ...]) -> bool:
    return all(shape)
