"""An operator under each of its configurations on a mesh, described and priced once.

Tables, the bounds on steps, the bound on pipelines and the simulator all ask for its steps and for
what they take: whoever asks first has them made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from shardfold.cluster import Mesh
from shardfold.costs.model import CostModel, price, split_seconds
from shardfold.costs.operator_steps import Tensors, operator_steps
from shardfold.costs.steps import Compute, Step, Steps, Values
from shardfold.sharding import Space, SubdimRule, space_of
from shardfold.sharding.configs import NONE


@dataclass(frozen=True, eq=False)
class PricedOperator:
    """An operator with its configurations; those that meet memory alike share one."""

    space: Space
    tensors: Tensors
    mesh: Mesh
    model: CostModel
    runs_again: bool

    @cached_property
    def steps(self) -> Steps:
        """Its steps, under every configuration."""
        return operator_steps(self.space, self.tensors, self.mesh, self.runs_again)

    @cached_property
    def _split(self) -> dict[int, tuple[Values, Values]]:
        return {
            id(step): split_seconds(self.model, step)
            for step in self.steps.steps
            if isinstance(step, Compute)
        }

    def split_seconds(self, step: Compute) -> tuple[Values, Values]:
        """Seconds of a step of work on the device, and of the host that asks for it ahead."""
        return self._split[id(step)]

    def costs(self, micro_batches: int) -> Values:
        """Seconds of all steps: of the device where the host runs ahead of it, else of both."""
        return price(self.steps, self.model, micro_batches, lambda s: self.split_seconds(s)[0])

    def case(self, row: int) -> Iterator[tuple[Step, tuple[float, float] | None]]:
        """The steps under one configuration; of work, seconds of the device and of the host."""
        for step in self.steps.steps:
            one = Steps(self.steps.cases, (step,)).case(row)
            split = self.split_seconds(step) if isinstance(step, Compute) else None
            seconds = None if split is None else (float(split[0][row]), float(split[1][row]))
            yield from ((each, seconds) for each in one)


@dataclass(eq=False)
class PricedOperators:
    """The operators of whatever graphs on one mesh."""

    mesh: Mesh
    model: CostModel
    spaces: dict[tuple[int, bool], Space] = field(default_factory=dict)  # by the rule
    known: dict[object, list[PricedOperator]] = field(default_factory=dict)

    def space(self, rule: SubdimRule, *, is_whole: bool) -> Space:
        """All configurations of a rule, or the one that splits nothing."""
        key = (id(rule), is_whole)
        if key not in self.spaces:
            none = np.full((1, len(self.mesh.axes)), NONE, dtype=np.int8)
            self.spaces[key] = Space(rule, none) if is_whole else space_of(rule, self.mesh)
        return self.spaces[key]

    def of(self, space: Space, tensors: Tensors, runs_again: bool) -> PricedOperator:
        """An operator by its configurations and tensors; `space` must stay as it is."""
        alike = self.known.setdefault((id(space), tensors, runs_again), [])
        for found in alike:
            if found.tensors.access == tensors.access:
                return found
        alike.append(PricedOperator(space, tensors, self.mesh, self.model, runs_again))
        return alike[-1]
