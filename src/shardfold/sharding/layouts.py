"""Layouts: for each mesh axis, the sub-dim of a tensor that it splits, or one of three states.

A layout is a row of small integers, one for each axis, so that thousands are compared and priced as
one numpy array. A sub-dim that several axes split is cut by the outer axis first.

    k >= 0       sub-dim k is split over the axis
    REPLICATED   every device has the whole, and the whole gradient
    SHARED       every device has the whole, but only a part of the gradient's sum
    PENDING      every device has a part of a sum
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

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


def forward_states(layouts: Layouts) -> Layouts:
    """The layouts of the values themselves: SHARED values are simply replicated."""
    return np.where(layouts == SHARED, REPLICATED, layouts).astype(np.int8)


def gradient_states(layouts: Layouts) -> Layouts:
    """The layouts of the gradients.

    The parts of a sum all get the whole gradient; that of a SHARED value is a pending sum.
    """
    swapped = np.where(layouts == PENDING, REPLICATED, layouts)
    return np.where(layouts == SHARED, PENDING, swapped).astype(np.int8)


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
