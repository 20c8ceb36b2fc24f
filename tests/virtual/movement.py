"""One array a device, laid out as a layout says, and moved by the steps that reshard lists.

Nothing here reads the planner's formulas: where a part begins follows from the layout's meaning
(an atom that several axes split is cut by the outer axis first, into chunks of equal length but
for the last), and a collective does what its name says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from shardfold.costs.steps import Collective
from shardfold.sharding.layouts import PENDING

Device = tuple[int, ...]
Array = NDArray[np.float64]
Shards = dict[Device, Array]  # each array has one dim per atom


def devices(shape: Sequence[int]) -> list[Device]:
    """Every device's place on the mesh."""
    return list(np.ndindex(*shape))


def chunks(size: int, parts: int) -> list[tuple[int, int]]:
    """Where each part begins and ends; all but the last are equally long."""
    length = -(-size // parts)
    return [(min(k * length, size), min((k + 1) * length, size)) for k in range(parts)]


def region(
    subdims: Sequence[int], layout: Sequence[int], shape: Sequence[int], device: Device
) -> tuple[slice, ...]:
    """The part of the whole that a device holds."""
    bounds = [(0, size) for size in subdims]
    for axis, state in enumerate(layout):
        if state >= 0:
            low, high = bounds[state]
            first, last = chunks(high - low, shape[axis])[device[axis]]
            bounds[state] = (low + first, low + last)
    return tuple(slice(low, high) for low, high in bounds)


def groups(shape: Sequence[int], axes: Sequence[int]) -> Iterator[list[Device]]:
    """Devices that differ only on `axes`, in order of their places there, outer axis first."""
    found: dict[Device, list[Device]] = {}
    for device in devices(shape):
        rest = tuple(-1 if axis in axes else at for axis, at in enumerate(device))
        found.setdefault(rest, []).append(device)
    yield from found.values()


def pending(layout: Sequence[int]) -> list[int]:
    return [axis for axis, state in enumerate(layout) if state == PENDING]


def place(
    value: Array, layout: Sequence[int], shape: Sequence[int], rng: np.random.Generator
) -> Shards:
    """Lay a value out; the parts of a pending sum are random."""
    shards: Shards = {}
    for group in groups(shape, pending(layout)):
        whole = value[region(value.shape, layout, shape, group[0])]
        parts = [rng.integers(-9, 9, whole.shape).astype(value.dtype) for _ in group[1:]]
        first = whole - sum(parts) if parts else whole.copy()
        shards.update(zip(group, [first, *parts], strict=True))
    return shards


def collect(
    shards: Shards, subdims: Sequence[int], layout: Sequence[int], shape: Sequence[int]
) -> Array:
    """The value that shards stand for; fails where copies differ or a part is missing."""
    whole = np.full(tuple(subdims), np.nan)
    for group in groups(shape, pending(layout)):
        at = region(subdims, layout, shape, group[0])
        total = sum(shards[device] for device in group[1:]) + shards[group[0]]
        assert total.shape == whole[at].shape, (layout, group, total.shape, whole[at].shape)
        known = ~np.isnan(whole[at])
        assert np.allclose(whole[at][known], total[known], rtol=1e-9, atol=1e-9), "copies differ"
        whole[at] = total
    assert not np.isnan(whole).any(), "some part is on no device"
    return whole


def perform(step: Collective, shards: Shards, shape: Sequence[int]) -> Shards:
    """The shards after one step of one case."""
    assert step.before is not None
    assert step.after is not None
    before, after = step.before[0], step.after[0]
    source, target = int(before[step.axes[0]]), int(after[step.axes[0]])
    moved: Shards = {}
    for group in groups(shape, step.axes):
        arrays = [shards[device] for device in group]
        sizes = [shape[axis] for axis in step.axes]
        after_step = _exchange(step.kind, arrays, source, target, sizes)
        moved.update(zip(group, after_step, strict=True))
    return moved


def _exchange(
    kind: str, arrays: list[Array], source: int, target: int, sizes: Sequence[int]
) -> list[Array]:
    """What the members of one group hold after a collective among them."""
    count = len(arrays)
    if kind == "all_reduce":
        return [sum(arrays[1:], arrays[0])] * count
    if kind == "all_gather":
        return [np.concatenate(arrays, axis=source)] * count
    if kind == "reduce_scatter":
        return _cut(sum(arrays[1:], arrays[0]), target, sizes)
    if kind == "all_to_all":
        sent = [_cut(array, target, sizes) for array in arrays]
        return [np.concatenate([parts[k] for parts in sent], axis=source) for k in range(count)]
    assert kind == "slice", kind
    if target == PENDING:
        return [arrays[0], *(np.zeros_like(array) for array in arrays[1:])]
    return [_cut(array, target, sizes)[k] for k, array in enumerate(arrays)]


def _cut(array: Array, dim: int, sizes: Sequence[int]) -> list[Array]:
    """Parts for the members of a group, cut by the outer axis first."""
    parts = [array]
    for size in sizes:
        parts = [
            part.take(range(low, high), axis=dim)
            for part in parts
            for low, high in chunks(part.shape[dim], size)
        ]
    return parts


def larger_side_items(step: Collective, before: Shards, after: Shards, members: int) -> int:
    """Elements on the step's larger side, with every part padded to the fullest."""
    if step.kind in ("all_gather", "reduce_scatter"):
        parts = before if step.kind == "all_gather" else after
        return max(array.size for array in parts.values()) * members
    return max(array.size for array in before.values())
