"""The weights of several sums at which the least weighted sum is largest.

For choices x with sums c_1(x), c_2(x), ... and weights w from a convex set,

    bound(w) = min over x of w . c(x)

is concave in w, and each value is proven by one solve. The choices met so far give an upper bound
on all of it, piecewise linear: bound(w) <= w . c(x) for each of them. Where that is largest is
the next w to solve at (Kelley's cutting planes), moved halfway to the best one so far, because
the first of these are far off. The two bounds meet.

The weights that were best for a problem much like this one are solved at first.

The convex set: in each group weights sum to at most one, less the weight of the last sum, which
stands beside all groups. Prices of what is limited have only a largest value each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardfold.search.interning import Array

ENOUGH = 2e-3  # relative: an upper bound that near cannot raise the lower one by much
_PIVOTS = 400


@dataclass(frozen=True, slots=True)
class WeightSet:
    """Which weights are allowed: of each group, of what stands beside them, and prices."""

    groups: tuple[tuple[int, ...], ...]
    beside: int
    most: tuple[tuple[int, float], ...] = ()  # prices: their numbers, and the largest

    @property
    def count(self) -> int:
        """How many weights there are."""
        return sum(map(len, self.groups)) + 1 + len(self.most)

    def rows(self) -> tuple[Array, Array]:
        """The set as `rows @ w <= limits`."""
        rows = np.zeros((len(self.groups) + 1 + len(self.most), self.count))
        limits = np.ones(len(rows))
        for row, group in zip(rows, self.groups, strict=False):
            row[list(group)] = row[self.beside] = 1.0
        rows[len(self.groups), self.beside] = 1.0
        for k, (number, largest) in enumerate(self.most, len(self.groups) + 1):
            rows[k, number], limits[k] = 1.0, largest
        return rows, limits


@dataclass(slots=True)
class Strongest:
    """The search for the best weights: the sums of choices met, and the best bound so far."""

    allowed: WeightSet
    met: list[Array] = field(default_factory=list)
    weights: Array | None = None  # of the best bound, or to begin with
    bound: float = -np.inf

    def next_weights(self) -> tuple[Array, float]:
        """Where the choices met leave the most room, and how much: no bound is larger."""
        rows, limits = self.allowed.rows()
        scale = max(float(np.abs(point).max()) for point in self.met) or 1.0
        table = np.zeros((len(self.met) + len(rows), self.allowed.count + 1))
        table[: len(self.met), -1] = 1.0  # the bound is at most what each choice leaves
        table[: len(self.met), :-1] = -np.array(self.met) / scale
        table[len(self.met) :, :-1] = rows
        goal = np.zeros(self.allowed.count + 1)
        goal[-1] = 1.0
        found = maximised(table, np.concatenate([np.zeros(len(self.met)), limits]), goal)
        return found[:-1], float(found[-1]) * scale

    def raise_bound(
        self,
        solve: Callable[[Array], tuple[Array, float]],
        *,
        enough: float = np.inf,
        rounds: int,
    ) -> None:
        """Solve at better and better weights, until the bound is `enough` or can hardly rise.

        `solve` minimises at some weights: the sums of the choice found, and the proven minimum.
        """
        for _ in range(rounds):
            weights, most = self.next_weights()
            if self.bound >= min(enough, most - ENOUGH * abs(most)):
                return
            if self.weights is not None:
                is_first = self.bound == -np.inf
                weights = self.weights if is_first else (weights + self.weights) / 2
            point, bound = solve(weights)
            self.met.append(point)
            if bound > self.bound:
                self.weights, self.bound = weights, bound


def maximised(rows: Array, limits: Array, goal: Sequence[float] | Array) -> Array:
    """The x >= 0 with `rows @ x <= limits` and the largest `goal @ x`; limits are not negative.

    The simplex method on a dense table. After many pivots the first column that gains is taken
    instead of the one that gains most (Bland), which cannot go round in circles; after very many
    it stops with what it has, which is allowed, if not the best.

    >>> maximised(np.array([[1.0, 2.0], [3.0, 1.0]]), np.array([4.0, 6.0]), [1.0, 1.0]).tolist()
    [1.6, 1.2]
    """
    m, n = rows.shape
    table = np.zeros((m + 1, n + m + 1))
    table[:m, :n], table[:m, n : n + m], table[:m, -1] = rows, np.eye(m), limits
    table[m, :n] = -np.asarray(goal)
    basis = np.arange(n, n + m)
    for pivot in range(_PIVOTS):
        gains = np.flatnonzero(table[m, :-1] < -1e-11)
        if not len(gains):
            break
        column = int(gains[0] if pivot > _PIVOTS // 2 else table[m, :-1].argmin())
        up = np.flatnonzero(table[:m, column] > 1e-11)
        if not len(up):
            break
        ratios = table[up, -1] / table[up, column]
        near = up[ratios <= ratios.min() + 1e-15]
        row = int(near[basis[near].argmin()])
        table[row] /= table[row, column]
        others = np.arange(m + 1) != row
        table[others] -= np.outer(table[others, column], table[row])
        basis[row] = column
    found = np.zeros(n + m)
    found[basis] = table[:m, -1]
    return np.maximum(found[:n], 0.0)
