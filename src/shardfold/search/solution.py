"""What a search reports while it works, and what it returns.

It returns a choice, its cost, and how far from the best it can be. Somebody else draws progress.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from shardfold.search.interning import Ints
from shardfold.search.problem import Problem


@dataclass(frozen=True, slots=True)
class Progress:
    """One step of a search: `done` of `total` steps, and the best cost known, if any."""

    method: str
    done: int
    total: int
    table_entries: int = 0
    best_cost: float | None = None


Watch = Callable[[Progress], None]


def ignore(progress: Progress) -> None:
    """A watch that looks away."""


TOLERANCE = 1e-9
"""Relative difference between cost and bound that rounding can explain."""

_LEAST = 1e-15
"""The same for costs that cancel to zero."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What one method found: a choice, and the bound that it proves.

    `lower_bound` None means that the method proves the choice cheapest and has no figure for it.
    `cost` is what the problem charges for the choice, where the method has added it up.
    """

    choice: Ints
    lower_bound: float | None = None
    order: str = "none"
    largest_table: int = 0
    peak_bytes: int = 0
    cost: float | None = None


class Choice(Sequence[int]):
    """One choice per vertex: a tuple of ints to read and to compare, kept as the array that it is.

    >>> choice = Choice(np.array([2, 0, 1]))
    >>> choice[0], choice[1:], choice == (2, 0, 1)
    (2, (0, 1), True)
    """

    __slots__ = ("_array",)

    def __init__(self, array: Ints) -> None:
        self._array = array.view()
        self._array.flags.writeable = False

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...
    def __getitem__(self, at: int | slice) -> int | tuple[int, ...]:
        found = self._array[at].tolist()
        return tuple(found) if isinstance(at, slice) else found

    def __len__(self) -> int:
        return len(self._array)

    def __iter__(self) -> Iterator[int]:
        return iter(self._array.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Choice):
            return np.array_equal(self._array, other._array)
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Ints:
        return np.array(self._array, dtype=dtype, copy=copy)


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

    choice: Sequence[int]
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


def unproven(
    problem: Problem, choice: Sequence[int] | Ints, method: str, lower_bound: float = -math.inf
) -> Solution:
    """A choice that nobody has proven best, with what it costs."""
    found = choice if isinstance(choice, Choice) else Choice(np.array(choice, dtype=np.int64))
    cost, size = problem.total(found), problem.total_bytes(found)
    return Solution(found, cost, False, min(cost, lower_bound), size, Statistics(method))


def reaches(cost: float, bound: float) -> bool:
    """Whether a bound proves a cost optimal, rounding aside."""
    return bound >= cost - TOLERANCE * abs(cost) - _LEAST
