"""Layouts: for each mesh axis, the sub-dim of a tensor that it splits, or one of three states.

A layout is a row of small integers, one for each axis, so that thousands are compared and priced as
one numpy array. A sub-dim that several axes split is cut by the outer axis first.

    k >= 0       sub-dim k is split over the axis
    REPLICATED   every device has the whole, and the whole gradient
    SHARED       every device has the whole, but only a part of the gradient's sum
    PENDING      every device has a part of a sum
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

Layouts = NDArray[np.int8]  # (number of layouts, axes)
Bounds = tuple[int, int]

REPLICATED = -1
PENDING = -2
SHARED = -3
# The words of plan files for states that split nothing.
STATE_WORDS = {REPLICATED: "replicated", SHARED: "replicated, gradient partial", PENDING: "partial"}


def chunk(bounds: Bounds, parts: int, place: int) -> Bounds:
    """The place-th of the parts of a range.

    >>> [chunk((0, 5), 2, place) for place in range(2)]
    [(0, 3), (3, 5)]
    """
    low, high = bounds
    length = -(-(high - low) // parts)
    return min(low + place * length, high), min(low + (place + 1) * length, high)


def bounds_of(
    sizes: Sequence[int],
    row: Sequence[int],
    shape: Sequence[int],
    at: Sequence[int],
    joint: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
) -> tuple[Bounds, ...]:
    """The range of each sub-dim (or factor) that the device at `at` of the mesh has.

    A `joint` factor cuts those that it stands for.
    """
    found = [(0, size) for size in sizes]
    for axis, state in enumerate(row):
        for part in joint.get(state, (state,)) if state >= 0 else ():
            found[part] = chunk(found[part], shape[axis], at[axis])
    return tuple(found)


def coordinates(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The places on a mesh of this shape, the last axis fastest.

    >>> list(coordinates((2, 2)))
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    return product(*map(range, shape))


def forward_states(layouts: Layouts) -> Layouts:
    """The layouts of the values themselves: SHARED values are simply replicated."""
    return np.where(layouts == SHARED, REPLICATED, layouts).astype(np.int8)


def gradient_states(layouts: Layouts) -> Layouts:
    """The layouts of the gradients.

    The parts of a sum all get the whole gradient; that of a SHARED value is a pending sum.
    """
    swapped = np.where(layouts == PENDING, REPLICATED, layouts)
    return np.where(layouts == SHARED, PENDING, swapped).astype(np.int8)


def copy_axes(row: Sequence[int], *, of_gradient: bool = False) -> tuple[int, ...]:
    """The axes along which all devices have the same value, or the same gradient.

    >>> copy_axes((0, REPLICATED, SHARED, PENDING))
    (1, 2)
    >>> copy_axes((0, REPLICATED, SHARED, PENDING), of_gradient=True)
    (1, 3)
    """
    same = (REPLICATED, PENDING if of_gradient else SHARED)
    return tuple(axis for axis, state in enumerate(row) if state in same)


def split_counts(layouts: Layouts, subdims: int, shape: Sequence[int]) -> NDArray[np.int64]:
    """For each layout and sub-dim, over how many devices the sub-dim is split."""
    counts = np.ones((len(layouts), subdims), dtype=np.int64)
    for axis, size in enumerate(shape):
        rows = np.flatnonzero(layouts[:, axis] >= 0)
        counts[rows, layouts[rows, axis]] *= size
    return counts


def local_items(
    layouts: Layouts, subdims: Sequence[int], shape: Sequence[int]
) -> NDArray[np.float64]:
    """How many elements of a tensor the fullest device holds under each layout."""
    if not subdims:
        return np.ones(len(layouts))
    counts = split_counts(layouts, len(subdims), shape)
    sizes = np.asarray(subdims, dtype=np.int64)
    items: NDArray[np.float64] = np.prod(-(-sizes // counts), axis=1, dtype=np.float64)
    return items


def distinct(layouts: Layouts) -> tuple[Layouts, NDArray[np.intp]]:
    """The distinct rows, and for each row which of them it is."""
    if layouts.shape[1] == 0:
        return layouts[:1], np.zeros(len(layouts), dtype=np.intp)
    return _distinct(layouts.shape, layouts.tobytes())


@lru_cache(maxsize=1024)
def _distinct(shape: tuple[int, int], rows: bytes) -> tuple[Layouts, NDArray[np.intp]]:
    """The same; a few sets of layouts are asked for again and again."""
    layouts = np.frombuffer(rows, dtype=np.int8).reshape(shape)
    unique, inverse = np.unique(layouts, axis=0, return_inverse=True)
    return unique, inverse.reshape(-1)


def storable(
    row: Sequence[int], subdims: Sequence[int], dims: Sequence[int], shape: Sequence[int]
) -> tuple[int, ...]:
    """The same storage of a parameter, whole on the axes whose split DTensor cannot say.

    Parts of inner pieces of a dim are strided in it. DTensor can say that of one axis, the last to
    split the dim; torch 2.13 puts a dim together wrongly where another axis splits strided parts.
    And it cannot say that inner pieces are uneven.

    >>> storable((1,), (3, 8, 16), (0, 0, 0), (2,))
    (1,)
    >>> storable((0,), (5, 16), (0, 0), (2,))
    (-1,)
    >>> storable((1, 1), (3, 8, 16), (0, 0, 0), (2, 2))
    (1, -1)
    """
    if len(set(dims)) == len(dims):
        return tuple(row)  # every dim is one piece
    lengths, uneven, strided = list(subdims), set[int](), set[int]()  # sub-dims; dims
    found = list(row)
    for axis, state in enumerate(row):
        if state < 0:
            continue
        dim = dims[state]
        is_even = lengths[state] % shape[axis] == 0 and state not in uneven
        is_last = pieces_product(lengths[state + 1 :], dims[state + 1 :], dim) == 1
        has_uneven = any(dims[k] == dim for k in uneven if k < state)
        if dim in strided or has_uneven or not (is_even or is_last):
            found[axis] = REPLICATED
            continue
        if pieces_product(lengths[:state], dims, dim) > 1:
            strided.add(dim)
        if not is_even:
            uneven.add(state)
        lengths[state] = -(-lengths[state] // shape[axis])
    return tuple(found)


def pieces_product(lengths: Sequence[int], dims: Sequence[int], dim: int) -> int:
    """Of the pieces of one dim."""
    return math.prod(n for n, d in zip(lengths, dims, strict=False) if d == dim)
