"""Reshards for one device: the steps that the cost model prices, with this device's sizes.

Where the planner's step says which axes change which sub-dim, the device's own also says how long
its part is before and after, and how long those of the others in its group are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from shardfold.costs.reshard import reshard
from shardfold.costs.steps import Collective, Kind, Phase, is_deferred
from shardfold.costs.steps import Step as PlannedStep
from shardfold.graph import TensorType
from shardfold.runtime.shards import Extent, Place, Row, bounds_of, extent, lengths
from shardfold.sharding.layouts import REPLICATED, forward_states, gradient_states


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
