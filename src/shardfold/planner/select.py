"""Which candidate wins: what fits in memory comes first, then the shorter step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from shardfold.planner.case import Candidate, Source
from shardfold.planner.options import Prefer
from shardfold.search import Problem
from shardfold.strategies.pins import Pin

HINT = "Try more devices, a smaller batch, or a dtype with fewer bytes."
ROUNDING = 1e-9
NEARLY = 1.005  # times the best step: so near, other virtues decide
MET: Mapping[Prefer, float] = {"speed": 1e-4, "simple": 1e-3, "memory": 1e-3}  # of a step
GIB = 2.0**30


def hint_for(smallest: Candidate, limit: float) -> str:
    """What to change first so that the smallest plan fits, and by how much."""
    found, devices = smallest.simulation, smallest.case.request.cluster.size
    return HINT if found is None else hint_by_class(found.peak_by_class, limit, devices)


def hint_by_class(by: Mapping[str, float], limit: float, devices: int) -> str:
    """The same, by what the fullest device holds of each class."""
    peak, passing = sum(by.values()), by.get("activations", 0.0) + by.get("buffers", 0.0)
    staying, over = peak - passing, peak - limit
    more = f"about {math.ceil(devices * peak / limit)} devices instead of {devices}"
    if staying >= limit:
        return (
            f"Parameters, gradients and optimizer state alone take {staying / GIB:.2f} GiB of a "
            f"device: try {more}, or a dtype or an optimizer with fewer bytes."
        )
    share = 1 - over / passing
    return (
        f"Activations and buffers take {passing / GIB:.2f} GiB of it: try first a batch of about "
        f"{share:.0%} of this one, or {more}."
    )


def least_seconds(problem: Problem) -> float:
    """Every decision at its cheapest, and nothing moved: no additive cost or step is below.

    Local work is never hidden, and every decision costs at least its cheapest choice.
    """
    kinds = problem.vertex_kinds
    least = np.array([table.min() for table in kinds.tables])
    return float(least[kinds.of].sum())


@dataclass
class Ranking:
    """Simulated candidates under a memory limit, as they come."""

    limit_bytes: float
    candidates: list[Candidate] = field(default_factory=list)
    prefer: Prefer = "speed"

    def order(self, candidate: Candidate) -> tuple[bool, float, float]:
        """What is better comes first: what fits, the shorter step, the least additive cost.

        Where the host is slower than any plan, steps are equal, but not what devices do.
        """
        over = candidate.peak_bytes > self.limit_bytes
        return (over, candidate.seconds, candidate.solution.cost)

    @property
    def winner(self) -> Candidate:
        """The fastest that fits; where none does, the fastest. Of equals the first."""
        return min(self.candidates, key=self.order)

    @property
    def preferred(self) -> Candidate:
        """Of those that are nearly as fast as the winner, the one with the virtue that is asked."""
        if self.prefer == "speed" or not self.has_fitting:
            return self.winner
        most = NEARLY * self.winner.seconds
        near = [c for c in self.fitting(self.candidates) if c.seconds <= most]
        if self.prefer == "memory":
            return min(near, key=lambda c: (c.peak_bytes, c.seconds))
        return min(near, key=lambda c: (c.kinds_of_splits, c.peak_bytes, c.seconds))

    def is_met(self, bound: float) -> bool:
        """Whether a bound on all steps is so near to the best that looking further is idle."""
        return self.has_fitting and bound >= (1 - MET[self.prefer]) * self.best_seconds

    @property
    def has_fitting(self) -> bool:
        """Whether any fits."""
        return self.winner.peak_bytes <= self.limit_bytes

    @property
    def best_seconds(self) -> float:
        """The shortest step that fits."""
        return self.best_of(self.candidates)

    @property
    def least_bytes(self) -> float:
        """The smallest peak, whether it fits or not."""
        return min(c.peak_bytes for c in self.candidates)

    def best_of(self, candidates: Iterable[Candidate]) -> float:
        """The shortest step among some that fits."""
        return min((c.seconds for c in self.fitting(candidates)), default=math.inf)

    def fitting(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Those that fit."""
        return [c for c in candidates if c.peak_bytes <= self.limit_bytes]


@dataclass(frozen=True)
class Selection:
    """The winner, everyone that it was held against, and what is proven."""

    winner: Candidate
    searched: tuple[Candidate, ...]  # the least additive cost of every case
    additive: Candidate  # the least additive cost of all
    limit_bytes: float
    simulated: tuple[Candidate, ...] = ()  # empty where the cost model knows no overlap
    smallest_bytes: float | None = None  # only where nothing fits
    floor_seconds: float | None = None  # a bound on cases that exist and were not searched
    step_bound: float | None = None  # no simulated step is shorter; none where there is no overlap
    pins: tuple[Pin, ...] = ()
    unpinned: Selection | None = None  # only with pins: the selection without them

    @property
    def lower_bound(self) -> float:
        """No choice on any mesh that was tried has a lower additive cost."""
        possible = [c for c in self.searched if c.feasible] or self.searched
        bounds = [candidate.solution.lower_bound for candidate in possible]
        return min(bounds if self.floor_seconds is None else [*bounds, self.floor_seconds])

    @property
    def step_lower_bound(self) -> float | None:
        """No choice on any mesh that was tried has a shorter simulated step."""
        return None if self.step_bound is None else min(self.step_bound, self.winner.seconds)

    @property
    def is_optimal(self) -> bool:
        """Whether the winner is proven to have the least additive cost."""
        return self.proves(self.winner)

    def proves(self, candidate: Candidate) -> bool:
        """Whether a candidate is proven to have the least additive cost."""
        found = candidate.solution
        return found.is_optimal and self.lower_bound >= found.cost * (1 - ROUNDING)

    @property
    def fits(self) -> bool:
        """Whether the winner does."""
        return self.needed_bytes <= self.limit_bytes

    @property
    def needed_bytes(self) -> float:
        """Of the winner where it fits, else of the smallest that was found."""
        smallest = self.smallest_bytes
        return self.winner.peak_bytes if smallest is None else smallest

    @property
    def is_bound(self) -> bool:
        """Whether the limit keeps something faster out."""
        if not self.fits:
            return True
        if not self.simulated:
            return self.winner.seconds > min(c.solution.lower_bound for c in self.searched)
        best = self._ranking.best_seconds
        return any(c.seconds < best and c.peak_bytes > self.limit_bytes for c in self.simulated)

    @property
    def best_baseline(self) -> Candidate | None:
        """The fastest baseline that fits."""
        baselines = [c for c in self.simulated if c.source is Source.BASELINE]
        fitting = self._ranking.fitting(baselines)
        return min(fitting, key=lambda c: c.seconds, default=None)

    def best_by_label(self) -> dict[str, Candidate]:
        """Of each label the fastest that fits, or else the fastest; the winner first.

        Baselines need not follow pins: with pins they are those of the selection without.
        """
        order = self._ranking.order
        found = {self.winner.label: self.winner}
        for candidate in sorted((*self.simulated, *self._unpinned_baselines), key=order):
            found.setdefault(candidate.label, candidate)
        return found

    def best_by_mesh(self) -> list[Candidate]:
        """The least additive cost on each mesh, whatever is recomputed."""
        found: dict[str, Candidate] = {}
        for candidate in self.searched:
            known = found.get(str(candidate.case.mesh))
            if known is None or _additive_order(candidate) < _additive_order(known):
                found[str(candidate.case.mesh)] = candidate
        return list(found.values())

    def best_on(self, mesh: str) -> float | None:
        """The fastest simulated step on a mesh that fits."""
        on = [c for c in self.simulated if str(c.case.mesh) == mesh]
        return min((c.seconds for c in self._ranking.fitting(on)), default=None)

    @property
    def _unpinned_baselines(self) -> list[Candidate]:
        others = () if self.unpinned is None else self.unpinned.simulated
        return [c for c in others if c.source is Source.BASELINE]

    @property
    def _ranking(self) -> Ranking:
        return Ranking(self.limit_bytes, list(self.simulated))


def _additive_order(candidate: Candidate) -> tuple[bool, float]:
    return (not candidate.feasible, candidate.solution.cost)
