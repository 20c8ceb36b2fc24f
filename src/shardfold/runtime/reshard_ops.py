"""Reshards performed: the plan's steps on a local tensor, autograd-aware.

The backward of a reshard is not derived from its forward: it is the plan's own list of steps for
the gradient. What is forward a slice can so be backward nothing at all, where a reader's gradient
is already what the producer wants.

A tensor is kept in the shape of its dims. A step on a piece of a dim views it by sub-dims, acts on
one of them, and the last step's result is viewed by dims again.

One input of the batch: how it may come, and the moves to the form in which it is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardfold.errors import RunError
from shardfold.runtime.local_reshard import Moves, Step
from shardfold.runtime.process_groups import Groups
from shardfold.sharding.layouts import PENDING


def perform(moves: Moves, local: Tensor, groups: Groups, *, owned: bool = False) -> Tensor:
    """The local part after all steps; the one given is written to only if it is `owned`."""
    if not moves.steps:
        return local
    for step in moves.steps:
        found = PERFORM[step.kind](step, local.reshape(step.before), groups, owned)
        # What a collective returns is new; a slice may still be the same memory.
        owned = owned or step.kind != "slice"
        local = found
    return local.reshape(moves.target)


@torch.no_grad()
def write_back(moves: Moves, local: Tensor, whole: Tensor) -> None:
    """Put a part that was sliced from `whole`, and written since, where it came from."""
    place = whole.view(moves.steps[0].before)
    for step in moves.steps:
        low, high = step.cut[step.place]
        place = place.narrow(step.joining, low, high - low)
    # A slice that is the same memory was written where it is; autograd may have saved it since.
    if place.untyped_storage()._cdata != local.untyped_storage()._cdata:
        place.copy_(local.reshape(place.shape))


def _all_reduce(step: Step, local: Tensor, groups: Groups, owned: bool) -> Tensor:
    is_free = owned and local.is_contiguous()
    own = local.detach() if is_free else local.clone(memory_format=torch.contiguous_format)
    return groups.all_reduce(own, step.axes)


def _all_gather(step: Step, local: Tensor, groups: Groups, owned: bool) -> Tensor:
    part = padded(local, step.leaving, max(step.gathered))
    return gathered(step, groups.all_gather(part, step.axes, len(step.gathered)))


def gathered(step: Step, stacked: Tensor) -> Tensor:
    """The whole, from what an all-gather stacked."""
    if min(step.gathered) == max(step.gathered) and math.prod(step.before[: step.leaving]) == 1:
        return stacked.reshape(step.after)
    pieces = [
        piece.narrow(step.leaving, 0, length)
        for piece, length in zip(stacked.unbind(0), step.gathered, strict=True)
    ]
    return torch.cat(pieces, step.leaving)


def _reduce_scatter(step: Step, local: Tensor, groups: Groups, owned: bool) -> Tensor:
    return scattered(step, groups.reduce_scatter(stacked(step, local), step.axes))


def stacked(step: Step, local: Tensor) -> Tensor:
    """What a reduce-scatter takes: everyone's part along a new first dim."""
    pieces = _cut(step, local)
    sizes = [piece.shape[step.joining] for piece in pieces]
    if min(sizes) == max(sizes) and math.prod(step.before[: step.joining]) == 1:
        return local.contiguous().view((len(pieces), *pieces[0].shape))
    return torch.stack([padded(piece, step.joining, max(sizes)) for piece in pieces])


def scattered(step: Step, mine: Tensor) -> Tensor:
    """The part of this device, from what a reduce-scatter returned."""
    return mine.narrow(step.joining, 0, step.after[step.joining])


def _all_to_all(step: Step, local: Tensor, groups: Groups, owned: bool) -> Tensor:
    shapes = []
    for length in step.gathered:
        shape = list(step.after)
        shape[step.leaving] = length
        shapes.append(shape)
    found = groups.all_to_all(_cut(step, local), [math.prod(s) for s in shapes], step.axes)
    pieces = [piece.view(shape) for piece, shape in zip(found, shapes, strict=True)]
    return torch.cat(pieces, step.leaving)


def _slice(step: Step, local: Tensor, groups: Groups, owned: bool) -> Tensor:
    if step.joining == PENDING:
        return local if step.place == 0 else torch.zeros_like(local)
    return _cut(step, local)[step.place].contiguous()


def _cut(step: Step, local: Tensor) -> list[Tensor]:
    return [local.narrow(step.joining, low, high - low) for low, high in step.cut]


def padded(tensor: Tensor, dim: int, length: int) -> Tensor:
    """The tensor with zeros at the end of a dim: the collectives want equal parts."""
    short = length - tensor.shape[dim]
    if not short:
        return tensor.contiguous()
    shape = list(tensor.shape)
    shape[dim] = short
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


PERFORM: dict[str, Callable[[Step, Tensor, Groups, bool], Tensor]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "slice": _slice,
}


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor on its way in the plan: values move one way, gradients the other.

    What is `owned` (a value that nobody else reads, a gradient just made) is written to in place.
    """

    there: Moves
    back: Moves
    owns_value: bool = False
    owns_gradient: bool = False

    def __call__(self, value: Tensor, groups: Groups) -> Tensor:
        """The value where its reader needs it."""
        if not (value.requires_grad and torch.is_grad_enabled()):
            return perform(self.there, value, groups)
        moved: Tensor = Reshard.apply(value, self, groups)
        return moved


class Reshard(torch.autograd.Function):
    """An edge for autograd: each direction by the plan's own steps."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, edge: Edge, groups: Groups) -> Tensor:
        """Take the values to where the reader needs them."""
        ctx.edge, ctx.groups = edge, groups
        moved = perform(edge.there, local, groups, owned=edge.owns_value)
        return moved.view_as(moved) if moved is local else moved

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Take the reader's gradient to where the writer wants it."""
        edge = ctx.edge
        return perform(edge.back, gradient, ctx.groups, owned=edge.owns_gradient), None, None


@dataclass(frozen=True, slots=True)
class Given:
    """How one input may come, and the moves from either form to the one that is read."""

    name: str
    whole: tuple[int, ...]
    part: tuple[int, ...]
    from_whole: Moves
    from_part: Moves

    def taken(self, value: Tensor, groups: Groups) -> Tensor:
        """What the step reads, of an input that is whole or a part."""
        shape = tuple(value.shape)
        if shape == self.whole:
            return perform(self.from_whole, value, groups)
        if shape == self.part:
            return perform(self.from_part, value, groups)
        part = "" if self.part == self.whole else f", or its part {self.part} on this rank"
        raise RunError(
            f"The input {self.name} has shape {shape}, the plan is for {self.whole}{part}. "
            "Pad or drop the last batch, or plan again."
        )
