"""How a parameter and its optimizer state are kept between steps.

As used: in the layout in which the reader needs it, a full copy on every axis that splits
something else; gradients are all-reduced. Sharded: further split over such axes; the parameter
is gathered for use and its gradient reduce-scattered, so that each device updates its own part.
A sharded parameter is gathered once in a step and kept (ZeRO-2), or dropped after use in forward
and gathered again for backward (ZeRO-3, fully sharded).

A parameter with several readers (a tied weight) may be kept SHARED on axes that would replicate it:
what the readers leave of its gradient there is added up first, and then all-reduced once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardfold.cluster import Mesh
from shardfold.costs.optimizers import Optimizer
from shardfold.costs.steps import Compute, Steps
from shardfold.graph import TensorType
from shardfold.sharding.configs import is_legal_split
from shardfold.sharding.layouts import REPLICATED, SHARED, Layouts, local_items, storable


@dataclass(frozen=True, slots=True)
class Storage:
    """The choices of one parameter: a layout each, and whether it is gathered again in backward."""

    layouts: Layouts
    regathers: NDArray[np.bool_]

    @property
    def has_sums(self) -> bool:
        """Whether some layout sums the gradients of several readers up before they are reduced."""
        return bool((self.layouts == SHARED).any())

    def at(self, choice: int) -> Storage:
        """One of the choices alone."""
        one = slice(choice, choice + 1)
        return Storage(self.layouts[one], self.regathers[one])


def storages(
    needed: Sequence[Layouts],
    subdims: Sequence[int],
    dims: Sequence[int],
    mesh: Mesh,
    summed: Sequence[int] = (),
) -> Storage:
    """Every storage worth having for readers that need these layouts.

    For each needed layout: itself, and for every set of its unsplit axes one sharded variant,
    kept or regathered. The sub-dim to shard is the largest that can be gathered by one all-gather.
    On the axes `summed`, those that are left whole may have their gradient summed up first.
    What DTensor cannot say is left whole on some axis.
    """
    rows: dict[tuple[int, ...], bool] = {}  # whether some reader has to gather it
    # A parameter is never kept as the parts of a sum: a reader that wants it so slices it for free.
    used = {tuple(max(int(s), REPLICATED) for s in row) for each in needed for row in each}
    bases = {storable(row, subdims, dims, mesh.shape) for row in used}
    for base in sorted(bases):
        free = [a for a, state in enumerate(base) if state == REPLICATED]
        for subset in range(1 << len(free)):
            axes = [a for k, a in enumerate(free) if subset >> k & 1]
            sharded = next(_sharded(base, axes, subdims, dims, mesh.shape), None)
            if sharded is not None:
                rows[sharded] = rows.get(sharded, False) or bool(axes)
    for row, gathers in list(rows.items()):
        rows |= dict.fromkeys(_with_sums(row, summed), gathers)
    plain = sorted(rows, key=lambda row: (SHARED in row, row))
    both = [(row, False) for row in plain] + [(row, True) for row in plain if rows[row]]
    layouts = np.array([row for row, _ in both], dtype=np.int8).reshape(len(both), len(mesh.axes))
    return Storage(layouts, np.array([again for _, again in both], dtype=bool))


def summed_axes(needed: Sequence[Layouts]) -> tuple[int, ...]:
    """The axes on which several readers can leave a part of the gradient's sum each."""
    readers = sum((layouts == SHARED).any(axis=0).astype(int) for layouts in needed)
    return tuple(np.flatnonzero(np.asarray(readers) > 1).tolist())


def _with_sums(row: tuple[int, ...], summed: Sequence[int]) -> list[tuple[int, ...]]:
    """The same storage with the gradient pending on each set of the axes where it is whole."""
    free = [a for a in summed if row[a] == REPLICATED]
    return [
        tuple(SHARED if a in free and subset >> free.index(a) & 1 else s for a, s in enumerate(row))
        for subset in range(1, 1 << len(free))
    ]


def _sharded(
    row: tuple[int, ...],
    axes: Sequence[int],
    subdims: Sequence[int],
    dims: Sequence[int],
    shape: Sequence[int],
) -> Iterator[tuple[int, ...]]:
    """The storage with `axes` split as well: the largest sub-dims first, as far as storable."""
    if storable(row, subdims, dims, shape) != row:
        return
    if not axes:
        yield row
        return
    axis, *rest = axes
    parts = [
        math.prod(n for n, s in zip(shape, row, strict=True) if s == k) for k in range(len(subdims))
    ]
    options = [
        k
        for k, size in enumerate(subdims)
        if all(state != k or other < axis for other, state in enumerate(row))
        and is_legal_split(size, parts[k] * shape[axis])
    ]
    for k in sorted(options, key=lambda k: (-subdims[k] / parts[k], k)):
        yield from _sharded((*row[:axis], k, *row[axis + 1 :]), rest, subdims, dims, shape)


def update_steps(
    storage: Storage, subdims: Sequence[int], kind: TensorType, optimizer: Optimizer, mesh: Mesh
) -> Steps:
    """The optimizer's run over the part of the parameter that a device keeps."""
    items = local_items(storage.layouts, subdims, mesh.shape)
    moved = items * kind.item_bytes * optimizer.memory_passes
    flops = items * optimizer.flops
    step = Compute(
        "update", "vector", kind.dtype, flops, moved, optimizer=optimizer.name, items=items
    )
    return Steps(len(items), (step,))


def sum_up_steps(
    storage: Storage,
    subdims: Sequence[int],
    kind: TensorType,
    mesh: Mesh,
    fresh_bytes: int | None = None,
) -> Steps:
    """The gradient of a pass, added to that of the passes before: two are read, one is written.

    The sum is of the kind in which the parameter is kept; an item of what comes has `fresh_bytes`,
    if it is of another.
    """
    items = local_items(storage.layouts, subdims, mesh.shape)
    moved = items * (2.0 * kind.item_bytes + (fresh_bytes or kind.item_bytes))
    step = Compute("backward", "vector", kind.dtype, items, moved, turn="later")
    return Steps(len(items), (step,))
