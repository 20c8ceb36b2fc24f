"""Which finalist wins: the fastest simulated step among those whose simulated peak fits.

The search keeps its sum of bytes within the limit; that sum stands for the peak, which the
simulation knows. Where no finalist's peak fits, the search is repeated with a limit that is as
much lower as its sum was too low; where its sum was too high, with one as much higher. The
choices with the least bytes are looked at before a model is said not to fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardfold.costs import Optimizer
from shardfold.errors import InfeasibleError
from shardfold.plans.assemble import Assembly
from shardfold.plans.choose import Candidate, Chosen
from shardfold.plans.finalists import Finalist, by_hand, searched, smallest, weighted, within
from shardfold.plans.replicas import Whole
from shardfold.plans.schedule import Scheduler
from shardfold.simulate import Schedule, Simulation, simulate

ROUNDS = 3  # of searches with another limit
NEAR = 0.98  # of the limit: a peak below leaves room that the search did not see
HINT = "Try more devices, a smaller batch, or a dtype with fewer bytes."


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

    @property
    def best_by_hand(self) -> Judged | None:
        """The fastest strategy by hand that fits."""
        limit = self.chosen.limit_bytes
        hands = [j for j in self.finalists if j.finalist.by_hand]
        fitting = [j for j in hands if j.simulation.peak_bytes <= limit]
        return min(fitting, key=lambda j: j.rank, default=None)

    def by_name(self) -> dict[str, Judged]:
        """Of each name the fastest that fits, or else the fastest."""
        found: dict[str, Judged] = {self.winner.finalist.name: self.winner}
        for judged in sorted(self.finalists, key=self._rank):
            found.setdefault(judged.finalist.name, judged)
        return found

    def peaks(self) -> dict[str, float]:
        """The peak of each name."""
        return {name: judged.simulation.peak_bytes for name, judged in self.by_name().items()}

    def best_on(self, mesh: str) -> float | None:
        """The fastest simulated step on a mesh that fits."""
        on = [j for j in self.finalists if str(j.finalist.candidate.mesh) == mesh]
        fitting = _fitting(on, self.chosen.limit_bytes)
        return min((j.rank for j in fitting), default=None)

    def _rank(self, judged: Judged) -> tuple[bool, float]:
        return (judged.simulation.peak_bytes > self.chosen.limit_bytes, judged.rank)


@dataclass(frozen=True)
class Judge:
    """Simulates choices for one model and cluster."""

    scheduler: Scheduler
    optimizer: Optimizer

    @cached_property
    def _assemblies(self) -> dict[int, Assembly]:
        return {}

    def schedule(self, candidate: Candidate) -> Schedule:
        """The step of a candidate's choice."""
        tables = candidate.tabulated
        own = tuple(candidate.solution.choice[: len(tables.vertices)])
        known = self._assemblies.get(id(tables))
        if known is None:
            graph, atoms = self.scheduler.graph, self.scheduler.atoms
            known = Assembly(graph, atoms, tables, own, candidate.model, self.optimizer)
            self._assemblies[id(tables)] = known
        assembly = known if known.choice == own else known.choosing(own)
        choice = np.array(candidate.solution.choice)
        return self.scheduler.schedule(Whole(assembly, candidate.unfolded, choice))

    def judged(self, finalists: Iterable[Finalist]) -> list[Judged]:
        """Each distinct finalist with its simulated step."""
        known: dict[tuple[int, tuple[int, ...]], Simulation] = {}
        found = []
        for finalist in finalists:
            key = (id(finalist.candidate.tabulated), finalist.candidate.solution.choice)
            if key not in known:
                known[key] = simulate(self.schedule(finalist.candidate))
            found.append(Judged(finalist, known[key]))
        return found

    def decide(self, chosen: Chosen, *, is_given: bool) -> Verdict:
        """The best of all finalists; `is_given`: a limit that cannot be met is an error."""
        limit = chosen.limit_bytes
        candidates = _distinct(chosen.tried)
        finalists = self.judged(searched(candidates, limit))
        if not chosen.pins:
            graph, atoms = self.scheduler.graph, self.scheduler.atoms
            finalists += self.judged(by_hand(candidates, graph, atoms, limit))
        finalists += self._relimited(finalists, limit)
        if not _fitting(finalists, limit):
            finalists += self.judged(smallest(candidate) for candidate in candidates)
        fitting = _fitting(finalists, limit)
        least = min(j.simulation.peak_bytes for j in finalists)
        if not fitting and is_given:
            raise InfeasibleError(needed_bytes=least, limit_bytes=limit, hint=HINT)
        winner = min(fitting or finalists, key=lambda j: j.rank)
        settled = replace(
            chosen,
            best=winner.finalist.candidate,
            smallest_bytes=None if fitting else least,
        )
        return Verdict(settled, winner, tuple(finalists))

    def _relimited(self, finalists: Sequence[Judged], limit: float) -> list[Judged]:
        """The search repeated where its sum of bytes was not the peak, and the limit binds."""
        found: list[Judged] = []
        fastest = min(finalists, key=lambda j: j.rank)
        if fastest.simulation.peak_bytes <= limit:
            return found
        fitting = _fitting(finalists, limit)
        at = min(fitting, key=lambda j: j.rank) if fitting else fastest
        for _ in range(ROUNDS):
            peak, bytes_ = at.simulation.peak_bytes, at.finalist.candidate.solution.bytes or 0.0
            if not bytes_ or NEAR * limit <= peak <= limit:
                break
            room = limit * bytes_ / peak
            again = [
                within(at.finalist.candidate, room),
                weighted(at.finalist.candidate, 0.1, room),
            ]
            judged = self.judged(f for f in again if f is not None)
            found += judged
            if not judged:
                break
            at = min(judged, key=lambda j: (j.simulation.peak_bytes > limit, j.rank))
        return found


def _distinct(tried: Sequence[Candidate]) -> list[Candidate]:
    """One candidate for each mesh and what it recomputes."""
    return list({(str(c.mesh), bool(c.tabulated.regions)): c for c in tried}.values())


def _fitting(finalists: Iterable[Judged], limit: float) -> list[Judged]:
    return [j for j in finalists if j.simulation.peak_bytes <= limit]
