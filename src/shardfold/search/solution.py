"""What a search returns: a choice, its cost, and how far from the best it can be."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardfold.search.kinds import Ints

TOLERANCE = 1e-9
"""Relative difference between cost and bound that rounding can explain."""

_LEAST = 1e-15
"""The same for costs that cancel to zero."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What one method found: a choice, and the bound that it proves.

    `lower_bound` None means that the method proves the choice cheapest and has no figure for it.
    """

    choice: Ints
    lower_bound: float | None = None
    order: str = "none"
    largest_table: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Statistics:
    """How a solution was found: method, order, time, and the tables it needed.

    `largest_table` counts entries; `peak_bytes` is what the tables held at once at most.
    """

    method: str
    order: str = "none"
    seconds: float = 0.0
    largest_table: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Solution:
    """One choice per vertex, with a proof: no choice costs less than `lower_bound`.

    `is_optimal` says that the bound is as high as the cost, up to rounding.
    """

    choice: tuple[int, ...]
    cost: float
    is_optimal: bool
    lower_bound: float
    bytes: float | None
    statistics: Statistics

    @property
    def gap(self) -> float:
        """How much of the cost might still be saved: 0 for a proven optimum."""
        if self.is_optimal or self.cost == self.lower_bound:
            return 0.0
        return (self.cost - self.lower_bound) / max(abs(self.cost), math.ulp(0.0))


def reaches(cost: float, bound: float) -> bool:
    """Whether a bound proves a cost optimal, rounding aside."""
    return bound >= cost - TOLERANCE * abs(cost) - _LEAST
