"""Every other split of one operator, with everything else chosen anew, within the memory limit.

Where the limit binds, a byte has a price w at it, and for the choices x that a split s leaves

    bound(s) = min over x of (cost + w bytes) - w limit

is at most the best step that fits: one ordinary search a split. Only splits that their bound lets
be the best are then searched within the limit, which takes much longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from shardfold.errors import InfeasibleError
from shardfold.search import Problem, Solution, solve
from shardfold.search.subproblem import Kept, Subproblem, restrict
from shardfold.sharding.names import Key, Rows, Split

MOST_SOLVED = 3  # splits of an operator that are searched within a limit that binds
WEIGHTS = 16  # prices of a byte that are tried
ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Tried:
    """A split, and how far it was searched: a choice that fits, a bound, or neither: none fits."""

    split: Split
    kept: Kept
    bound: float
    solution: Solution | None = None
    fits: bool = True

    @property
    def order(self) -> float:
        """What the split costs at least."""
        return self.bound if self.solution is None else self.solution.cost


@dataclass(frozen=True)
class Limit:
    """A problem with the limit on its choices' bytes; None leaves memory aside."""

    problem: Problem  # every choice
    left: Subproblem  # those that pins leave
    limit_bytes: float | None

    @cached_property
    def binds(self) -> bool:
        """Whether the cheapest choice does not fit."""
        return self.limit_bytes is not None and not self.is_within(self.left.solve())

    @cached_property
    def byte_price(self) -> float:
        """What a byte is worth at a limit that binds: the slope of the hull of (bytes, cost)."""
        problem = self.left.problem
        assert self.limit_bytes is not None
        over, under = (_point(problem, solve(p)) for p in (problem, problem.blended(0.0, 1.0)))
        price = 0.0
        for _ in range(WEIGHTS):
            price = max((under[0] - over[0]) / (over[1] - under[1]), 0.0)
            cost, size = _point(problem, solve(problem.blended(1.0, price)))
            if cost + price * size >= (over[0] + price * over[1]) * (1 - ROUNDING):
                break
            over, under = (
                (over, (cost, size)) if size <= self.limit_bytes else ((cost, size), under)
            )
        return price

    @cached_property
    def blend(self) -> Problem:
        """The problem with bytes at their price."""
        return self.problem.blended(1.0, self.byte_price)

    def is_within(self, solution: Solution) -> bool:
        """Whether a choice fits."""
        return self.limit_bytes is None or (solution.bytes or 0.0) <= self.limit_bytes

    def first_look(self, split: Split, kept: Kept) -> Tried:
        """One ordinary search: the best choice, where that fits, or a bound."""
        if not self.binds:
            found = restrict(self.problem, kept).solve()
            return Tried(split, kept, found.lower_bound, found if self.is_within(found) else None)
        assert self.limit_bytes is not None
        found = restrict(self.blend, kept).solve()
        bound = found.lower_bound - self.byte_price * self.limit_bytes
        cost, size = self.problem.total(found.choice), self.problem.total_bytes(found.choice)
        is_best = size <= self.limit_bytes and cost <= bound + ROUNDING * cost
        exact = replace(found, cost=cost, bytes=size, lower_bound=bound)
        return Tried(split, kept, bound, exact if is_best else None)

    def second_look(self, tried: Tried) -> Tried:
        """The search within the limit."""
        try:
            found = restrict(self.problem, tried.kept).solve(self.limit_bytes)
        except InfeasibleError:
            return replace(tried, fits=False)
        return replace(tried, solution=found, bound=max(found.lower_bound, tried.bound))


def _point(problem: Problem, solution: Solution) -> tuple[float, float]:
    return problem.total(solution.choice), problem.total_bytes(solution.choice)


def alternatives(
    limit: Limit, v: int, offered: Mapping[Key, tuple[Split, Rows]], chosen: Key, everything: bool
) -> list[Tried]:
    """The splits of vertex v but the chosen one: known costs first, then bounds, then no fit.

    With `everything`, all are searched within the limit.
    """
    pinned = {u: rows for u, rows in limit.left.kept.items() if u != v}
    found = [
        limit.first_look(split, {**pinned, v: rows})
        for key, (split, rows) in offered.items()
        if key != chosen
    ]
    budget = len(found) if everything else MOST_SOLVED
    while budget:
        best = min((t.order for t in found if t.solution is not None), default=float("inf"))
        waiting = [t for t in found if t.solution is None and t.fits]
        waiting = [t for t in waiting if everything or t.bound < best * (1 - ROUNDING)]
        if not waiting:
            break
        first = min(waiting, key=lambda t: t.bound)
        found[found.index(first)] = limit.second_look(first)
        budget -= 1
    return sorted(found, key=lambda t: (not t.fits, t.solution is None, t.order))
