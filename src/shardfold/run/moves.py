"""Reshards performed: the plan's steps on a local tensor, autograd-aware.

The backward of a reshard is not derived from its forward: it is the plan's own list of steps for
the gradient. What is forward a slice can so be backward nothing at all, where a reader's gradient
is already what the producer wants.

A tensor is kept in the shape of its dims. A step on a piece of a dim views it by atoms, acts on
one of them, and the last step's result is viewed by dims again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardfold.run.groups import Groups
from shardfold.run.steps import Moves, Step
from shardfold.spaces.layout import PENDING


def perform(moves: Moves, local: Tensor, groups: Groups) -> Tensor:
    """The local part after all steps; the one given is never written to."""
    if not moves.steps:
        return local
    for step in moves.steps:
        local = PERFORM[step.kind](step, local.reshape(step.before), groups)
    return local.reshape(moves.target)


@torch.no_grad()
def write_back(moves: Moves, local: Tensor, whole: Tensor) -> None:
    """Put a part that was sliced from `whole`, and written since, where it came from."""
    place = whole.view(moves.steps[0].before)
    for step in moves.steps:
        low, high = step.cut[step.place]
        place = place.narrow(step.joining, low, high - low)
    if place.data_ptr() != local.data_ptr():
        place.copy_(local.reshape(place.shape))


def _all_reduce(step: Step, local: Tensor, groups: Groups) -> Tensor:
    return groups.all_reduce(local.clone(memory_format=torch.contiguous_format), step.axes)


def _all_gather(step: Step, local: Tensor, groups: Groups) -> Tensor:
    longest = max(step.gathered)
    padded = _padded(local, step.leaving, longest)
    stacked = groups.all_gather(padded, step.axes, len(step.gathered))
    if min(step.gathered) == longest and math.prod(step.before[: step.leaving]) == 1:
        return stacked.reshape(step.after)
    pieces = [
        piece.narrow(step.leaving, 0, length)
        for piece, length in zip(stacked.unbind(0), step.gathered, strict=True)
    ]
    return torch.cat(pieces, step.leaving)


def _reduce_scatter(step: Step, local: Tensor, groups: Groups) -> Tensor:
    pieces = _cut(step, local)
    longest = max(piece.shape[step.joining] for piece in pieces)
    stacked = torch.stack([_padded(piece, step.joining, longest) for piece in pieces])
    mine = groups.reduce_scatter(stacked, step.axes)
    return mine.narrow(step.joining, 0, step.after[step.joining])


def _all_to_all(step: Step, local: Tensor, groups: Groups) -> Tensor:
    shapes = []
    for length in step.gathered:
        shape = list(step.after)
        shape[step.leaving] = length
        shapes.append(shape)
    found = groups.all_to_all(_cut(step, local), [math.prod(s) for s in shapes], step.axes)
    pieces = [piece.view(shape) for piece, shape in zip(found, shapes, strict=True)]
    return torch.cat(pieces, step.leaving)


def _slice(step: Step, local: Tensor, groups: Groups) -> Tensor:
    if step.joining == PENDING:
        return local if step.place == 0 else torch.zeros_like(local)
    return _cut(step, local)[step.place].contiguous()


def _cut(step: Step, local: Tensor) -> list[Tensor]:
    return [local.narrow(step.joining, low, high - low) for low, high in step.cut]


def _padded(tensor: Tensor, dim: int, length: int) -> Tensor:
    """The tensor with zeros at the end of a dim: the collectives want equal parts."""
    short = length - tensor.shape[dim]
    if not short:
        return tensor.contiguous()
    shape = list(tensor.shape)
    shape[dim] = short
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


PERFORM: dict[str, Callable[[Step, Tensor, Groups], Tensor]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "slice": _slice,
}


class Reshard(torch.autograd.Function):
    """An edge of the plan: values move one way, gradients the other, each by its own steps."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, there: Moves, back: Moves, groups: Groups) -> Tensor:
        """Take the values to where the reader needs them."""
        ctx.back, ctx.groups = back, groups
        moved = perform(there, local, groups)
        return moved.view_as(moved) if moved is local else moved

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Take the reader's gradient to where the writer wants it."""
        return perform(ctx.back, gradient, ctx.groups), None, None, None
