"""Reshards on one device: the steps with its sizes, and how autograd runs them.

They are the steps that the cost model prices, with this device's sizes. Where the planner's step
says which axes change which sub-dim, the device's own also says how long its part is before and
after, and how long those of the others in its group are.

The backward of a reshard is not derived from its forward: it is the plan's own list of steps for
the gradient. What is forward a slice can so be backward nothing at all, where a reader's gradient
is already what the producer wants.

A tensor is kept in the shape of its dims. A step on a piece of a dim views it by sub-dims, acts on
one of them, and the last step's result is viewed by dims again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardfold.costs.decision_graph import Cast
from shardfold.costs.reshard import reshard
from shardfold.costs.steps import Collective, Kind, Phase, is_deferred
from shardfold.costs.steps import Step as PlannedStep
from shardfold.errors import RunError
from shardfold.graph import TensorType
from shardfold.runtime.process_groups import Groups
from shardfold.runtime.shards import Extent, Place, Row, bounds_of, extent, lengths
from shardfold.sharding.layouts import PENDING, REPLICATED, forward_states, gradient_states


@dataclass(frozen=True, slots=True)
class Step:
    """One move of one tensor, as one device does it.

    `gathered` are the lengths of the leaving sub-dim on every member of the group, `cut` the ranges
    (within the local part) of the joining sub-dim that go to every member. `place` is this device's
    number in the group.
    """

    kind: Kind
    axes: tuple[int, ...]
    place: int
    before: tuple[int, ...]  # local size of each sub-dim
    after: tuple[int, ...]
    leaving: int = REPLICATED  # the sub-dim that was split over the axes
    joining: int = REPLICATED  # the sub-dim that will be, or PENDING
    gathered: tuple[int, ...] = ()
    cut: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Moves:
    """The steps from one layout to another, and the local shapes on both sides."""

    steps: tuple[Step, ...]
    source: tuple[int, ...]
    target: tuple[int, ...]

    def __bool__(self) -> bool:
        return bool(self.steps)

    @property
    def is_deferred(self) -> bool:
        """Whether a gradient that goes this way waits for the last pass of a step."""
        return is_deferred([step.kind for step in self.steps])

    @property
    def is_even(self) -> bool:
        """Whether all members of a group have parts of one size, before and after."""
        cuts = [[high - low for low, high in step.cut] for step in self.steps]
        return all(len(set(sizes)) <= 1 for sizes in (*(s.gathered for s in self.steps), *cuts))

    def at_once(self, kind: Kind, levels: Sequence[int]) -> tuple[int, ...] | None:
        """The axes of the one gather or scatter that all steps can be; None if there is none such.

        Several can be one where parts are even, and links of one level are crossed: between levels
        less is sent if each has a collective of its own.
        """
        if not self.steps or any(step.kind != kind for step in self.steps):
            return None
        if len(self.steps) == 1:
            return self.steps[0].axes
        axes = tuple(sorted(axis for step in self.steps for axis in step.axes))
        return axes if self.is_even and len({levels[axis] for axis in axes}) == 1 else None


@dataclass(frozen=True, slots=True)
class Woven:
    """How the even shards of a tensor make it up: by axes and sub-dims, and in which order.

    What a gather stacks has the axes in front; in the whole, each stands before the sub-dim that it
    cuts.
    """

    axes: tuple[int, ...]
    shape: tuple[int, ...]  # of everyone's parts: the size of each axis, then of each sub-dim
    order: tuple[int, ...]

    @classmethod
    def of(cls, moves: Moves, axes: tuple[int, ...], place: Place) -> Woven:
        """As all-gathers put parts together, or as reduce-scatters cut them."""
        gathers = moves.steps[0].kind == "all_gather"
        steps = moves.steps if gathers else moves.steps[::-1]
        subdims = steps[0].before if gathers else steps[0].after
        dims = [[len(axes) + atom] for atom in range(len(subdims))]
        for step in steps:
            atom = step.leaving if gathers else step.joining
            dims[atom] = [*map(axes.index, step.axes), *dims[atom]]
        shape = (*(place.shape[axis] for axis in axes), *subdims)
        return cls(axes, shape, tuple(dim for each in dims for dim in each))

    @property
    def members(self) -> int:
        """How many devices have a part."""
        return math.prod(self.shape[: len(self.axes)])

    def whole(self, parts: Tensor) -> Tensor:
        """From everyone's parts, stacked."""
        return parts.reshape(self.shape).permute(self.order)

    def parts(self, whole: Tensor) -> Tensor:
        """Everyone's parts, flat and stacked."""
        apart = whole.reshape([self.shape[dim] for dim in self.order])
        back = [self.order.index(dim) for dim in range(len(self.order))]
        return apart.permute(back).reshape(self.members, -1)


@dataclass(frozen=True, slots=True)
class Lie:
    """What a reshard depends on besides layouts: a tensor's sub-dims and dims, and the place."""

    kind: TensorType
    subdims: tuple[int, ...]
    dims: tuple[int, ...]
    place: Place

    def extent(self, row: Row) -> Extent:
        """The local part under a layout of values."""
        return extent(self.subdims, self.dims, len(self.kind.shape), row, self.place)

    def moves(self, source: Row, target: Row, phase: Phase) -> Moves:
        """The steps from `source` to `target`, both states of values or both of gradients."""
        before, after = (np.array(row, np.int8).reshape(1, -1) for row in (source, target))
        shape, size = self.place.shape, self.kind.item_bytes
        found = reshard(before, after, shape, self.subdims, size, phase).case(0)
        return self.local(found, source, target)

    def local(self, found: Sequence[PlannedStep], source: Row, target: Row) -> Moves:
        """The planner's steps from one layout to another, as this device does them."""
        steps = tuple(self._step(step) for step in found if isinstance(step, Collective))
        return Moves(steps, self.extent(source).shape, self.extent(target).shape)

    def _step(self, step: Collective) -> Step:
        assert step.before is not None
        assert step.after is not None
        before, after = (tuple(map(int, side[0])) for side in (step.before, step.after))
        place, axis = self.place, step.axes[0]
        members = place.members(step.axes)
        mine = bounds_of(self.subdims, before, place.shape, place.at)
        leaving, joining = before[axis], after[axis]
        gathered: Sequence[int] = ()
        cut: Sequence[tuple[int, int]] = ()
        if leaving >= 0:
            theirs = (bounds_of(self.subdims, before, place.shape, at) for at in members)
            gathered = [high - low for low, high in (found[leaving] for found in theirs)]
        if joining >= 0:
            start = mine[joining][0]
            parts = (bounds_of(self.subdims, after, place.shape, at)[joining] for at in members)
            cut = [(low - start, high - start) for low, high in parts]
        return Step(
            step.kind,
            step.axes,
            members.index(place.at),
            lengths(mine),
            lengths(bounds_of(self.subdims, after, place.shape, place.at)),
            leaving,
            joining,
            tuple(gathered),
            tuple(cut),
        )


def values(row: Row) -> Row:
    """The layout of the values under a layout."""
    return tuple(forward_states(np.array(row, np.int8)).tolist())


def gradients(row: Row) -> Row:
    """The layout of the gradients under a layout."""
    return tuple(gradient_states(np.array(row, np.int8)).tolist())


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
class Casting:
    """The dtypes of a parameter with master weights: what is kept, used, and sent as a gradient.

    Where all is run in float64 nothing is cast.
    """

    kept: torch.dtype
    used: torch.dtype
    sent: torch.dtype

    @classmethod
    def of(cls, cast: Cast) -> Casting:
        """By the names of the dtypes."""
        return cls(*(getattr(torch, name) for name in (cast.kept, cast.used, cast.sent)))

    def to_use(self, value: Tensor) -> Tensor:
        """A kept value as its reader takes it."""
        return value.to(self.used) if value.dtype == self.kept else value

    def to_send(self, gradient: Tensor) -> Tensor:
        """A gradient as it is reduced."""
        return gradient.to(self.sent) if gradient.dtype != torch.float64 else gradient

    def to_keep(self, gradient: Tensor) -> Tensor:
        """A gradient as it is added to that of the master weights."""
        return gradient.to(self.kept) if gradient.dtype != torch.float64 else gradient


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor on its way in the plan: values move one way, gradients the other.

    What is `owned` (a value that nobody else reads, a gradient just made) is written to in place.
    A parameter with master weights is `cast` before it goes, its gradient before and after.
    """

    there: Moves
    back: Moves
    owns_value: bool = False
    owns_gradient: bool = False
    cast: Casting | None = None

    def __call__(self, value: Tensor, groups: Groups) -> Tensor:
        """The value where its reader needs it."""
        if not (value.requires_grad and torch.is_grad_enabled()):
            used = value if self.cast is None else self.cast.to_use(value)
            return perform(self.there, used, groups)
        moved: Tensor = Reshard.apply(value, self, groups)
        return moved


class Reshard(torch.autograd.Function):
    """An edge for autograd: each direction by the plan's own steps."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, edge: Edge, groups: Groups) -> Tensor:
        """Take the values to where the reader needs them."""
        ctx.edge, ctx.groups = edge, groups
        used = local if edge.cast is None else edge.cast.to_use(local)
        moved = perform(edge.there, used, groups, owned=edge.owns_value)
        return moved.view_as(moved) if moved is local else moved

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Take the reader's gradient to where the writer wants it."""
        edge, cast = ctx.edge, ctx.edge.cast
        sent = gradient if cast is None else cast.to_send(gradient)
        found = perform(edge.back, sent, ctx.groups, owned=edge.owns_gradient)
        return (found if cast is None else cast.to_keep(found)), None, None


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
