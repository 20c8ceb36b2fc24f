"""Which part of a tensor, and of an operator's iteration space, one device has.

A sub-dim that several axes split is cut by the outer axis first, each time into chunks of
ceil(size / parts) points, the last ones shorter:

    10 points over axes of 2 and 2:  5 | 5  ->  3, 2 | 3, 2
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardfold.sharding.layouts import Bounds, bounds_of, chunk

__all__ = [
    "Bounds",
    "Extent",
    "Place",
    "Row",
    "bounds_of",
    "chunk",
    "extent",
    "lengths",
]

Row = tuple[int, ...]  # a state, or a factor, for each mesh axis


def lengths(bounds: Sequence[Bounds]) -> tuple[int, ...]:
    """How many points each range has."""
    return tuple(high - low for low, high in bounds)


@dataclass(frozen=True, slots=True)
class Place:
    """One device's place on a mesh: the mesh's shape, and the coordinates on it."""

    shape: tuple[int, ...]
    at: tuple[int, ...]

    @classmethod
    def of_rank(cls, rank: int, shape: Sequence[int]) -> Place:
        """The place of a rank; the last axis varies fastest.

        >>> Place.of_rank(5, (2, 4)).at
        (1, 1)
        """
        at = []
        for size in reversed(shape):
            rank, place = divmod(rank, size)
            at.append(place)
        return cls(tuple(shape), tuple(reversed(at)))

    def members(self, axes: Sequence[int]) -> list[Row]:
        """The coordinates of all devices that differ from this one on `axes` only, in order."""
        found = [self.at]
        for axis in axes:
            found = [
                (*at[:axis], k, *at[axis + 1 :]) for at in found for k in range(self.shape[axis])
            ]
        return found

    def rank(self, at: Row) -> int:
        """The rank of the device at `at`."""
        number = 0
        for size, place in zip(self.shape, at, strict=True):
            number = number * size + place
        return number


@dataclass(frozen=True, slots=True)
class Extent:
    """The part of one tensor that a device has: the range of every sub-dim, and its dims."""

    subdims: tuple[int, ...]
    dims: tuple[int, ...]
    rank: int
    bounds: tuple[Bounds, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """The local size of each sub-dim."""
        return lengths(self.bounds)

    @property
    def shape(self) -> tuple[int, ...]:
        """The local size of each dim."""
        return tuple(self._product(self.lengths, dim) for dim in range(self.rank))

    @property
    def whole(self) -> tuple[int, ...]:
        """The global size of each dim."""
        return tuple(self._product(self.subdims, dim) for dim in range(self.rank))

    def _product(self, sizes: Sequence[int], dim: int) -> int:
        return math.prod(n for n, d in zip(sizes, self.dims, strict=True) if d == dim)

    def pieces(self, dim: int) -> list[tuple[int, Bounds]]:
        """The sub-dims of one dim, major first: size and local range."""
        found = zip(self.subdims, self.bounds, self.dims, strict=True)
        return [(size, bounds) for size, bounds, d in found if d == dim]


def extent(
    subdims: Sequence[int], dims: Sequence[int], rank: int, row: Row, place: Place
) -> Extent:
    """The part of a tensor that the device at `place` has under the layout `row`."""
    bounds = bounds_of(subdims, row, place.shape, place.at)
    return Extent(tuple(subdims), tuple(dims), rank, bounds)
