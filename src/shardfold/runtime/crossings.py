"""Tensors on their way from stage to stage: what this rank sends of each, and what it receives.

Which device sends what to which is in `shardfold.pipeline.boundary`; here are the tensors. A piece
is a range of every sub-dim of what a device has, and goes as a message of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardfold.pipeline.boundary import End, Route, copies, route, taken
from shardfold.runtime.ops import Context
from shardfold.runtime.process_groups import Axes
from shardfold.runtime.reshard import gradients, values
from shardfold.runtime.shards import Bounds, Extent, Row, lengths

SIDES = ("F", "B")  # values go on, gradients come back
Range = tuple[slice, ...]  # of every sub-dim


@dataclass(frozen=True, slots=True)
class Lying:
    """How a tensor lies on one of its two sides, and who is there."""

    first: int  # the rank that the part of the cluster begins with
    shape: tuple[int, ...]  # of its mesh
    row: Row

    def end(self, side: str) -> End:
        """The layout of the value, or of the gradient."""
        return End(self.shape, values(self.row) if side == "F" else gradients(self.row))

    def at(self, rank: int) -> tuple[int, ...] | None:
        """A rank's place on the mesh, if it is one of these."""
        number, found = rank - self.first, []
        if not 0 <= number < math.prod(self.shape):
            return None
        for size in reversed(self.shape):
            number, place = divmod(number, size)
            found.append(place)
        return tuple(reversed(found))


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What this rank sends of a tensor, piece by piece."""

    summed: Axes
    lengths: tuple[int, ...]
    pieces: tuple[tuple[int, Range], ...]  # to which rank

    def cut(self, tensor: Tensor, context: Context) -> Iterator[tuple[int, Tensor]]:
        """Every piece with the rank that it goes to."""
        if self.summed:
            own = tensor.clone(memory_format=torch.contiguous_format)
            tensor = context.groups.all_reduce(own, self.summed)
        whole = tensor.reshape(self.lengths)
        for rank, each in self.pieces:
            yield rank, whole[each].contiguous()


@dataclass(frozen=True, slots=True)
class Incoming:
    """What this rank receives of a tensor, and how it is put together."""

    shape: tuple[int, ...]
    lengths: tuple[int, ...]  # of what it receives
    dtype: torch.dtype
    pieces: tuple[tuple[int, Range], ...]  # from which rank
    gathered: Axes = ()
    along: int = 0
    whole: int = 0  # the length of the gathered sub-dim

    def buffers(self, context: Context) -> list[tuple[int, Tensor]]:
        """Memory for every piece, with the rank that it comes from."""
        return [
            (rank, torch.empty(_size(each), dtype=self.dtype, device=context.device))
            for rank, each in self.pieces
        ]

    def joined(self, found: Sequence[Tensor], context: Context) -> Tensor:
        """The part that this rank is to have."""
        own = list(self.lengths)
        if self.gathered:
            members = math.prod(context.groups.place.shape[axis] for axis in self.gathered)
            own[self.along] = -(-self.whole // members)
        if len(found) == 1 and list(found[0].shape) == own:
            part = found[0]
        else:
            part = torch.zeros(own, dtype=self.dtype, device=context.device)
            for (_, each), piece in zip(self.pieces, found, strict=True):
                part[each] = piece
        if self.gathered:
            every = context.groups.all_gather(part, self.gathered, members)
            part = torch.cat(list(every), self.along).narrow(self.along, 0, self.whole)
        return part.reshape(self.shape)


def _size(each: Range) -> tuple[int, ...]:
    return tuple(one.stop - one.start for one in each)


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor that crosses a cut: this rank's part in that, in both directions."""

    requires_grad: bool
    ways: tuple[Outgoing | Incoming | None, Outgoing | Incoming | None]

    def outgoing(self, side: str) -> Outgoing:
        """As this rank sends it."""
        found = self.ways[SIDES.index(side)]
        assert isinstance(found, Outgoing)
        return found

    def incoming(self, side: str) -> Incoming:
        """As this rank receives it."""
        found = self.ways[SIDES.index(side)]
        assert isinstance(found, Incoming)
        return found

    @property
    def axes(self) -> set[Axes]:
        """On which it needs process groups."""
        found = [w.summed if isinstance(w, Outgoing) else w.gathered for w in self.ways if w]
        return set(found) - {()}


Shares = Callable[[Axes], Axes]  # of the axes with copies those along which each takes a part


def crossing(
    whole: Extent,
    dtype: torch.dtype,
    ends: tuple[Lying, Lying],
    shares: tuple[Shares, Shares],
    rank: int,
    requires_grad: bool,
) -> Crossing:
    """Of a tensor between two stages; `shares` are of the receivers, values first."""
    ways = [
        _way(whole, dtype, pair, side, share, rank)
        for side, pair, share in zip(SIDES, (ends, ends[::-1]), shares, strict=True)
    ]
    return Crossing(requires_grad, (ways[0], ways[1] if requires_grad else None))


def _way(
    whole: Extent,
    dtype: torch.dtype,
    ends: tuple[Lying, Lying],
    side: str,
    share: Shares,
    rank: int,
) -> Outgoing | Incoming | None:
    source, target = (each.end(side) for each in ends)
    found = route(whole.subdims, source, target, share(copies(target)))
    return moved(whole, dtype, ends, (source, target), found, rank)


def moved(
    whole: Extent,
    dtype: torch.dtype,
    places: tuple[Lying, Lying],
    ends: tuple[End, End],
    found: Route,
    rank: int,
) -> Outgoing | Incoming | None:
    """A rank's part in a route; nothing, if it is on neither side."""
    (sender, receiver), (source, target) = places, ends
    if (at := sender.at(rank)) is not None:
        own = source.bounds(whole.subdims, at)
        pieces = [
            (receiver.first + p.receiver, _within(p.bounds, own))
            for p in found.pieces
            if sender.first + p.sender == rank
        ]
        return Outgoing(found.summed, lengths(own), tuple(pieces))
    if (at := receiver.at(rank)) is None:
        return None
    own = target.bounds(whole.subdims, at)
    part = taken(whole.subdims, target, found.gathered, found.along, at)
    pieces = [
        (sender.first + p.sender, _within(p.bounds, part))
        for p in found.pieces
        if receiver.first + p.receiver == rank
    ]
    shape = Extent(whole.subdims, whole.dims, whole.rank, own).shape
    long = lengths(own)[found.along] if found.gathered else 0
    return Incoming(shape, lengths(part), dtype, tuple(pieces), found.gathered, found.along, long)


def _within(bounds: Sequence[Bounds], own: Sequence[Bounds]) -> Range:
    """A range of the whole as one of a device's own part."""
    return tuple(
        slice(low - first, high - first)
        for (low, high), (first, _) in zip(bounds, own, strict=True)
    )
