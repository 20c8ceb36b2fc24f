"""Reshards for one device: the steps that the cost model prices, with this device's sizes.

Where the planner's step says which axes change which atom, the device's own also says how long
its part is before and after, and how long those of the others in its group are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardfold.costs.reshard import reshard
from shardfold.costs.steps import Collective, Kind, Phase, is_held
from shardfold.graph import TensorType
from shardfold.run.parts import Extent, Place, Row, bounds_of, extent, lengths
from shardfold.spaces.layout import PENDING, REPLICATED, SHARED


@dataclass(frozen=True, slots=True)
class Step:
    """One move of one tensor, as one device does it.

    `gathered` are the lengths of the leaving atom on every member of the group, `cut` the ranges
    (within the local part) of the joining atom that go to every member. `place` is this device's
    number in the group.
    """

    kind: Kind
    axes: tuple[int, ...]
    place: int
    before: tuple[int, ...]  # local size of each atom
    after: tuple[int, ...]
    leaving: int = REPLICATED  # the atom that was split over the axes
    joining: int = REPLICATED  # the atom that will be, or PENDING
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
    def is_held(self) -> bool:
        """Whether a gradient that goes this way waits for the last pass of a step."""
        return is_held([step.kind for step in self.steps])


@dataclass(frozen=True, slots=True)
class Lie:
    """What a reshard depends on besides layouts: a tensor's atoms and dims, and the place."""

    kind: TensorType
    atoms: tuple[int, ...]
    dims: tuple[int, ...]
    place: Place

    def extent(self, row: Row) -> Extent:
        """The local part under a layout of values."""
        return extent(self.atoms, self.dims, len(self.kind.shape), row, self.place)

    def moves(self, source: Row, target: Row, phase: Phase) -> Moves:
        """The steps from `source` to `target`, both states of values or both of gradients."""
        before, after = (np.array(row, np.int8).reshape(1, -1) for row in (source, target))
        shape, size = self.place.shape, self.kind.item_bytes
        found = reshard(before, after, shape, self.atoms, size, phase).case(0)
        steps = tuple(self._step(step) for step in found if isinstance(step, Collective))
        return Moves(steps, self.extent(source).shape, self.extent(target).shape)

    def _step(self, step: Collective) -> Step:
        assert step.before is not None
        assert step.after is not None
        before, after = (tuple(map(int, side[0])) for side in (step.before, step.after))
        place, axis = self.place, step.axes[0]
        members = place.members(step.axes)
        mine = bounds_of(self.atoms, before, place.shape, place.at)
        leaving, joining = before[axis], after[axis]
        gathered: Sequence[int] = ()
        cut: Sequence[tuple[int, int]] = ()
        if leaving >= 0:
            theirs = (bounds_of(self.atoms, before, place.shape, at) for at in members)
            gathered = [high - low for low, high in (found[leaving] for found in theirs)]
        if joining >= 0:
            start = mine[joining][0]
            parts = (bounds_of(self.atoms, after, place.shape, at)[joining] for at in members)
            cut = [(low - start, high - start) for low, high in parts]
        return Step(
            step.kind,
            step.axes,
            members.index(place.at),
            lengths(mine),
            lengths(bounds_of(self.atoms, after, place.shape, place.at)),
            leaving,
            joining,
            tuple(gathered),
            tuple(cut),
        )


def values(row: Row) -> Row:
    """The layout of the values: SHARED ones are simply whole."""
    return tuple(REPLICATED if state == SHARED else state for state in row)


def gradients(row: Row) -> Row:
    """The layout of the gradients: see `shardfold.spaces.layout.gradient_states`."""
    swap = {PENDING: REPLICATED, SHARED: PENDING}
    return tuple(swap.get(state, state) for state in row)
