"""Which finalist wins: the fastest simulated step among those whose simulated peak fits.

The search keeps its sum of bytes within the limit; that sum stands for the peak, which the
simulation knows. Where no finalist's peak fits, the search is repeated with a limit that is as
much lower as its sum was too low; where its sum was too high, with one as much higher. The
choices with the least bytes are looked at before a model is said not to fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardfold.cluster import Cluster
from shardfold.costs import Optimizer
from shardfold.planner.lower_bounds import least_seconds
from shardfold.planner.mesh_search import Candidate, Chosen
from shardfold.planner.proposals import (
    EVERYONE,
    OVERLAP,
    WEIGHTS,
    Field,
    Finalist,
    at_weight,
    by_hand,
    discounted,
    searched,
    smallest,
    weighted,
    within,
)
from shardfold.search import Problem
from shardfold.simulate import Schedule, Simulation, simulate
from shardfold.simulate.decoded import Assembly
from shardfold.simulate.tasks import Scheduler
from shardfold.simulate.unrolled import Whole

KNOWN = ("data-parallel", "fsdp")  # every plan is held against these
ROUNDS = 3  # of searches with another limit
LITTLE = 0.05  # of the limit: so little below it, the choices that were met on the way will do
SHY = 0.997  # of the limit that a peak just above it asks for, or the next is above it, too
NEAR = 0.98  # of the limit: a peak below leaves room that the search did not see


@dataclass(frozen=True, slots=True)
class Judged:
    """A finalist with its simulated step."""

    finalist: Finalist
    simulation: Simulation

    @property
    def rank(self) -> float:
        """The simulated step."""
        return self.simulation.step_seconds


@dataclass(frozen=True)
class Verdict:
    """The winner, and everyone that it was held against."""

    chosen: Chosen
    winner: Judged
    finalists: tuple[Judged, ...]
    held_against: tuple[Judged, ...] = ()  # with pins: the baselines, which do not follow them

    @property
    def best_by_hand(self) -> Judged | None:
        """The fastest strategy by hand that fits."""
        limit = self.chosen.limit_bytes
        hands = [j for j in self.finalists if j.finalist.is_by_hand]
        fitting = [j for j in hands if j.simulation.peak_bytes <= limit]
        return min(fitting, key=lambda j: j.rank, default=None)

    def by_name(self) -> dict[str, Judged]:
        """Of each name the fastest that fits, or else the fastest."""
        found: dict[str, Judged] = {self.winner.finalist.name: self.winner}
        for judged in sorted((*self.finalists, *self.held_against), key=self.order):
            found.setdefault(judged.finalist.name, judged)
        return found

    def best_on(self, mesh: str) -> float | None:
        """The fastest simulated step on a mesh that fits."""
        on = [j for j in self.finalists if str(j.finalist.candidate.mesh) == mesh]
        fitting = _fitting(on, self.chosen.limit_bytes)
        return min((j.rank for j in fitting), default=None)

    def order(self, judged: Judged) -> tuple[bool, float]:
        """What is better comes first: what fits in memory, then the shorter step."""
        return (judged.simulation.peak_bytes > self.chosen.limit_bytes, judged.rank)


@dataclass(frozen=True)
class Judge:
    """Simulates choices for one model and cluster."""

    cluster: Cluster
    optimizer: Optimizer
    schedulers: dict[int, Scheduler] = field(default_factory=dict)
    assemblies: dict[int, Assembly] = field(default_factory=dict)
    floors: dict[int, Problem] = field(default_factory=dict)

    def floor_seconds(self, finalist: Finalist) -> float:
        """No simulated step is shorter than this: all but the communication of parameters."""
        candidate, tables = finalist.candidate, finalist.candidate.tabulated
        if id(tables) not in self.floors:
            self.floors[id(tables)] = at_weight(tables, candidate.unfolded.problem, 0.0)
        return self.floors[id(tables)].total(candidate.solution.choice)

    def schedule(self, finalist: Finalist) -> Schedule:
        """The step of a finalist's choice."""
        at, candidate = finalist.field, finalist.candidate
        if id(at.graph) not in self.schedulers:
            self.schedulers[id(at.graph)] = Scheduler(at.graph, at.subdims, self.cluster)
        tables, own = candidate.tabulated, candidate.own_choice
        if id(tables) not in self.assemblies:
            self.assemblies[id(tables)] = Assembly(
                at.graph, at.subdims, tables, own, candidate.model, self.optimizer
            )
        known = self.assemblies[id(tables)]
        assembly = known if known.choice == own else known.choosing(own)
        choice = np.array(candidate.solution.choice)
        whole = Whole(assembly, candidate.unfolded, choice)
        return self.schedulers[id(at.graph)].schedule(whole)

    def judged(self, finalists: Iterable[Finalist]) -> list[Judged]:
        """Each finalist with its simulated step."""
        return [Judged(finalist, simulate(self.schedule(finalist))) for finalist in finalists]

    def hands(self, fields: Sequence[Field], limit: float) -> list[Judged]:
        """Strategies by hand: of each name the best, and of all the best; others are left out.

        What cannot be faster than one of the same name that fits is not simulated, nor what
        cannot be faster than the best of all, but for the two strategies that everybody knows.
        """
        found: list[Judged] = []

        def keeping(candidate: Candidate) -> Sequence[str]:
            return () if candidate.tabulated.regions else EVERYONE

        def recomputing(candidate: Candidate) -> Sequence[str]:
            best = min((j.rank for j in _fitting(found, limit)), default=math.inf)
            hopeless = least_seconds(candidate.unfolded.problem) >= best
            return () if keeping(candidate) else KNOWN if hopeless else EVERYONE

        for names in keeping, recomputing:
            proposed = [f for each in fields for f in by_hand(each, limit, names)]
            floors = [(self.floor_seconds(finalist), finalist) for finalist in proposed]
            for floor, finalist in sorted(floors, key=lambda pair: pair[0]):
                same = [j for j in found if j.finalist.name == finalist.name]
                rivals = same if finalist.name in KNOWN else found
                if all(j.rank > floor for j in _fitting(rivals, limit)):
                    found += self.judged([finalist])
        return found

    def decide(self, fields: Sequence[Field], chosen: Chosen) -> Verdict:
        """The fastest of all finalists that fits; where none does, the fastest."""
        limit = chosen.limit_bytes
        finalists = [] if chosen.pins else self.hands(fields, limit)

        def best() -> float:
            return min((j.rank for j in _fitting(finalists, limit)), default=math.inf)

        for each in fields:
            for finalist in searched(each):
                if chosen.pins or not finalists or self.floor_seconds(finalist) < best():
                    finalists += self.judged([finalist])
        for each in fields:
            for finalist in discounted(each, limit, best, self.floor_seconds):
                finalists += self.judged([finalist])
        finalists += self._relimited(finalists, limit)
        if not _fitting(finalists, limit):
            for each in fields:
                finalists += self.judged(smallest(each, c) for c in each.candidates)
        fitting = _fitting(finalists, limit)
        least = min(j.simulation.peak_bytes for j in finalists)
        winner = min(fitting or finalists, key=lambda j: j.rank)
        best_candidate, smallest_bytes = winner.finalist.candidate, None if fitting else least
        settled = replace(chosen, best=best_candidate, smallest_bytes=smallest_bytes)
        return Verdict(settled, winner, tuple(finalists))

    def among(self, verdict: Verdict, judged: Sequence[Judged]) -> Verdict:
        """The verdict after further finalists, of which one may win; a tie changes nothing."""
        winner = min((verdict.winner, *judged), key=verdict.order)
        fits = winner.simulation.peak_bytes <= verdict.chosen.limit_bytes
        needed = None if fits else verdict.chosen.smallest_bytes
        chosen = replace(verdict.chosen, best=winner.finalist.candidate, smallest_bytes=needed)
        return Verdict(chosen, winner, (*verdict.finalists, *judged))

    def least(self, fields: Sequence[Field]) -> Judged:
        """The smallest peak of the choices with the fewest bytes."""
        found: list[Judged] = []
        for each in fields:
            found += self.judged(smallest(each, c) for c in each.candidates)
        return min(found, key=lambda j: j.simulation.peak_bytes)

    def _relimited(self, finalists: Sequence[Judged], limit: float) -> list[Judged]:
        """The search repeated where its sum of bytes was not the peak, and the limit binds."""
        found: list[Judged] = []
        fastest = min(finalists, key=lambda j: j.rank)
        if fastest.simulation.peak_bytes <= limit:
            return found
        at = min(_fitting(finalists, limit) or [fastest], key=lambda j: j.rank)
        for _ in range(ROUNDS):
            peak, total = at.simulation.peak_bytes, at.finalist.candidate.solution.bytes or 0.0
            if not total or NEAR * limit <= peak <= limit:
                break
            here, candidate = at.finalist.field, at.finalist.candidate
            room = limit * total / peak * (SHY if peak > limit else 1.0)
            rounds = 0 if room >= (1 - LITTLE) * limit else None
            was_weighted = any(
                j.finalist.candidate.tabulated is candidate.tabulated
                and j.finalist.name.startswith(OVERLAP)
                for j in (*finalists, *found)
            )
            again = [
                within(here, candidate, room, rounds),
                weighted(here, candidate, WEIGHTS[-1], room, rounds if was_weighted else None),
            ]
            judged = self.judged(f for f in again if f is not None)
            found += judged
            if not judged:
                break
            at = min(judged, key=lambda j: (j.simulation.peak_bytes > limit, j.rank))
        return found


def _fitting(finalists: Iterable[Judged], limit: float) -> list[Judged]:
    return [j for j in finalists if j.simulation.peak_bytes <= limit]
