"""One input of the batch: how it may come, and the moves to the form in which it is read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shardfold.errors import RunError
from shardfold.run.groups import Groups
from shardfold.run.moves import perform
from shardfold.run.steps import Moves


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
