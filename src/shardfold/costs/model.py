"""A cost model prices steps: the interface, and what all models know of collectives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np

from shardfold.costs.steps import Collective, Compute, Steps, Values, times


class CostModel(Protocol):
    """Turns steps into seconds. Must be pure: the same step always costs the same."""

    def compute_seconds(self, step: Compute) -> Values:
        """Seconds of local work, for each case."""
        ...

    def collective_seconds(self, step: Collective) -> Values:
        """Seconds of one collective, for each of its rows."""
        ...


def sums_gradients(model: CostModel) -> bool:
    """Whether gradients of a parameter from several readers may be summed up before they are sent.

    They may, unless a model says of itself that it counts every reader for itself.
    """
    return bool(getattr(model, "sums_gradients", True))


def is_beside(model: CostModel, step: Collective) -> bool:
    """Whether a collective that nobody waits for yet runs beside the device's own work.

    It does, unless a model says that it takes the same processor.
    """
    takes: Callable[[Collective], bool] | None = getattr(model, "takes_processor", None)
    return takes is None or not takes(step)


def price(steps: Steps, model: CostModel, micro_batches: int = 1) -> Values:
    """Seconds of each case: the sum over its steps, each as often as so many passes do it."""
    total = np.zeros(steps.cases)
    for step in steps.steps:
        often = times(step, micro_batches)
        if isinstance(step, Compute):
            total += model.compute_seconds(step) * often
        elif step.kind != "slice":
            total[step.rows] += model.collective_seconds(step) * (step.repeats * often)
    return total


# What one device sends in a collective over n, as a multiple of the step's bytes; and how many
# messages follow one another.
VOLUME: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2.0 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "halo": lambda n: 1.0,
}
ROUNDS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2.0 * math.ceil(math.log2(n)),
    "all_gather": lambda n: math.ceil(math.log2(n)),
    "reduce_scatter": lambda n: math.ceil(math.log2(n)),
    "all_to_all": lambda n: n - 1.0,
    "halo": lambda n: 1.0,
}
