"""What crosses a cut between two stages: which device sends which part of a tensor to which.

A tensor lies in one layout on the mesh of the stage that sends it, and in another on that of the
stage that takes it. Its tiles are the parts that devices of the first mesh have; every device of
the second takes what its own part has in common with each tile:

    sum      parts of a sum are added up before they leave, within the stage that sends
    send     each tile goes out once: devices that have the same take turns
    gather   devices that would all take the same take a part each, and gather it within their stage

    4 rows, split over 2 devices -> whole on 3:  (4 rows are taken as 2, 2, 0 of 3 copies)
        0 -> 0: rows 0, 1;  1 -> 1: rows 2, 3;  then 0, 1, 2 gather

Where both layouts and meshes are the same, each device sends to the one in its place, and parts of
a sum go as they are. What a tensor's gradient does is the same the other way, in the layouts of
gradients. The simulator prices a route, the runner takes it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardfold.sharding.layouts import PENDING, REPLICATED, Bounds, bounds_of, chunk, coordinates

Axes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class End:
    """How a tensor, or its gradient, lies on one side: the mesh's shape, and a state for each axis.

    A state is a sub-dim, REPLICATED, or PENDING.
    """

    shape: tuple[int, ...]
    row: tuple[int, ...]

    def axes(self, state: int) -> Axes:
        """Those that have a state."""
        return tuple(axis for axis, own in enumerate(self.row) if own == state)

    def bounds(self, sizes: Sequence[int], at: Sequence[int]) -> tuple[Bounds, ...]:
        """The part of the device at a place."""
        return bounds_of(sizes, self.row, self.shape, tuple(at))

    def items(self, sizes: Sequence[int]) -> int:
        """How many elements the fullest device has."""
        return _items(self.bounds(sizes, (0,) * len(self.shape)))


def _items(bounds: Sequence[Bounds]) -> int:
    return math.prod(high - low for low, high in bounds)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one device sends to one other: a range of each sub-dim."""

    sender: int
    receiver: int
    bounds: tuple[Bounds, ...]

    @property
    def items(self) -> int:
        """How many elements it has."""
        return _items(self.bounds)


@dataclass(frozen=True, slots=True)
class Route:
    """How one tensor crosses."""

    summed: Axes  # of the mesh that sends: along these, parts of a sum are added up before
    pieces: tuple[Piece, ...]
    gathered: Axes = ()  # of the mesh that receives: along these, each takes a part
    along: int = 0  # of which sub-dim

    @property
    def busiest(self) -> tuple[int, int]:
        """The most elements that a device sends or receives, and the most messages."""
        items, count = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
        for piece in self.pieces:
            for end in (("out", piece.sender), ("in", piece.receiver)):
                items[end] += piece.items
                count[end] += 1
        return max(items.values(), default=0), max(count.values(), default=0)


@lru_cache(maxsize=4096)
def route(sizes: tuple[int, ...], source: End, target: End, shares: Axes = ()) -> Route:
    """From one side to the other; receivers along `shares`, which have copies, gather parts."""
    stays = source == target  # parts of a sum go to those who have the same place
    shares = shares if sizes else ()
    along = _along(sizes, target, shares)
    tiles: dict[tuple[object, ...], list[int]] = {}
    boxes: list[tuple[Bounds, ...]] = []
    for rank, at in enumerate(coordinates(source.shape)):
        own = source.bounds(sizes, at)
        key = (own, tuple(at[axis] for axis in source.axes(PENDING)) if stays else ())
        if key not in tiles:
            boxes.append(own)
        tiles.setdefault(key, []).append(rank)
    takers, wanted = [], []
    for rank, at in enumerate(coordinates(target.shape)):
        if stays or not any(at[axis] for axis in target.axes(PENDING)):  # the others add nothing
            takers.append((rank, tuple(at[axis] for axis in target.axes(PENDING))))
            wanted.append(taken(sizes, target, shares, along, at))
    pieces = []
    holders, turns = list(tiles.items()), Counter[int]()
    for (taker, tile), bounds in _common(wanted, boxes):
        (_, pending), have = holders[tile]
        rank, place = takers[taker]
        if stays and pending != place:
            continue
        pieces.append(Piece(have[turns[tile] % len(have)], rank, bounds))
        turns[tile] += 1
    summed = () if stays else source.axes(PENDING)
    return Route(summed, tuple(pieces), shares, along)


def taken(
    sizes: Sequence[int], target: End, shares: Axes, along: int, at: Sequence[int]
) -> tuple[Bounds, ...]:
    """What the device at a place receives: its part, or one of the parts of what it has to have."""
    own = list(target.bounds(sizes, at))
    if shares:
        number = 0
        for axis in shares:
            number = number * target.shape[axis] + at[axis]
        own[along] = chunk(own[along], math.prod(target.shape[a] for a in shares), number)
    return tuple(own)


def _along(sizes: Sequence[int], target: End, shares: Axes) -> int:
    """The sub-dim that receivers cut: the first that goes evenly, else the longest."""
    if not shares:
        return 0
    count = math.prod(target.shape[axis] for axis in shares)
    first = target.bounds(sizes, (0,) * len(target.shape))
    lengths = [high - low for low, high in first]
    even = [k for k, length in enumerate(lengths) if length % count == 0]
    return even[0] if even else max(range(len(lengths)), key=lambda k: lengths[k])


def _common(
    wanted: Sequence[tuple[Bounds, ...]], boxes: Sequence[tuple[Bounds, ...]]
) -> list[tuple[tuple[int, int], tuple[Bounds, ...]]]:
    """Whatever each of the first has in common with each of the second, where it is not empty."""
    rank = len(boxes[0])
    first, second = (
        np.array(each, dtype=np.int64).reshape(len(each), rank, 2) for each in (wanted, boxes)
    )
    low = np.maximum(first[:, None, :, 0], second[None, :, :, 0])
    high = np.minimum(first[:, None, :, 1], second[None, :, :, 1])
    found = np.argwhere((high > low).all(axis=2))
    return [
        ((a, b), tuple(zip(low[a, b].tolist(), high[a, b].tolist(), strict=True)))
        for a, b in found.tolist()
    ]


def copies(end: End) -> Axes:
    """The axes along which all devices have the same."""
    return end.axes(REPLICATED)
