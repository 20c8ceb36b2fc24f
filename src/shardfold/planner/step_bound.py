"""A proven bound on the simulated step of every plan, and the choices that its proof meets.

`costs.demands` has sums that no step of a choice is shorter than. Any average of them is a sum
over decisions and edges, so the exact search finds its least value over all choices: no plan on
that mesh has a shorter step. `search.weights` finds the averages whose least value is largest.

At the best weights a choice is cheap if it asks about as much of the links as of the work beside
them, which is what overlap rewards: the choices met on the way are proposed as candidates, and
so are mixtures of two of them, which store some parameters as one does and some as the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations

import numpy as np

from shardfold.costs.demands import Demands
from shardfold.costs.steps import Values
from shardfold.costs.unroll import Ints
from shardfold.planner.case import Candidate, Case, Source
from shardfold.planner.select import Ranking
from shardfold.search.interning import Array
from shardfold.search.subproblem import Subproblem, restrict
from shardfold.search.weights import Strongest, WeightSet

ROUNDING = 1e-7  # of a step: equal blocks are counted to within less
LABEL = "search with overlap"
ROUNDS = 10  # of solves on a mesh, at most
SHARES = (1 / 4, 1 / 2, 3 / 4)  # of the parameters that are stored another way
FEW = 4  # choices that are mixed with one another


@dataclass(eq=False)
class CaseBound:
    """The bound for one mesh, and the choices that were met."""

    candidate: Candidate  # any of the case
    demands: Demands
    strongest: Strongest
    choices: list[Ints] = field(default_factory=list)

    @classmethod
    def of(cls, candidate: Candidate) -> CaseBound:
        """Nothing is proven yet."""
        case = candidate.case
        levels = len(case.request.cluster.levels)
        optimizer = case.request.optimizer
        demands = Demands(
            case.graph, case.subdims, case.tables, case.cost_model, optimizer, levels
        )
        bounds = demands.bounds
        return cls(candidate, demands, Strongest(WeightSet(bounds.groups, len(bounds.sums) - 1)))

    @property
    def case(self) -> Case:
        """The graph on its mesh."""
        return self.candidate.case

    @property
    def seconds(self) -> float:
        """No plan of the case has a shorter step."""
        return max(self.strongest.bound * (1 - ROUNDING), 0.0)

    def least(self, choice: Ints) -> float:
        """A step that this one choice does not fall below: of each phase the longest sum."""
        return self._least(self.demands.bounded(self.case.unrolled, choice))

    def _least(self, sums: Values) -> float:
        phases = sum(float(sums[list(group)].max()) for group in self.demands.bounds.groups)
        return max(phases, float(sums[-1])) * (1 - ROUNDING)

    def meet(self, choice: Ints) -> None:
        """Let a choice that somebody else found guide the weights."""
        self.strongest.met.append(self.demands.bounded(self.case.unrolled, choice))

    def propose(self, ranking: Ranking, enough: float) -> Iterator[Candidate]:
        """Raise the bound until it is `enough`; each choice met that may win is a candidate."""
        for _ in range(ROUNDS):
            count = len(self.choices)
            top = min(enough, ranking.best_seconds)
            self.strongest.raise_bound(self._solve, enough=top, rounds=1)
            if len(self.choices) == count:
                return
            choice = self.choices[-1]
            if self._least(self.strongest.met[-1]) < ranking.best_seconds:
                yield self._candidate(choice)

    def mix(self, ranking: Ranking) -> Iterator[Candidate]:
        """Mixtures of the best choices that were met, the most hopeful first."""
        best = sorted(self.choices, key=self.least)[:FEW]
        stored = [v for v, x in enumerate(self._vertices) if x.storage is not None]
        found = [
            mixed(own, other, stored, share)
            for own, other in permutations(best, 2)
            for share in SHARES
        ]
        distinct = {choice.tobytes(): choice for choice in found}
        ordered = sorted((self.least(choice), key) for key, choice in distinct.items())
        for least, key in ordered[:FEW]:
            if least < ranking.best_seconds:
                yield self._candidate(distinct[key])

    @property
    def _vertices(self) -> Sequence[object]:
        vertices, copied = self.case.tables.vertices, self.case.unrolled.vertices
        return vertices if copied is None else [vertices[v] for v in copied.tolist()]

    def _candidate(self, choice: Ints) -> Candidate:
        return self.candidate.choosing(choice, Source.OVERLAP, LABEL)

    def _solve(self, weights: Array) -> tuple[Array, float]:
        case = self.case
        problem = case.unrolled.like(self.demands.weighted(weights))
        kept = case.allowed.kept
        left = restrict(problem, kept) if kept else Subproblem(problem, {})
        found = case.patience.spend(lambda seconds: left.solve(seconds=seconds))
        self.choices.append(np.array(found.choice))
        return self.demands.bounded(case.unrolled, self.choices[-1]), found.lower_bound


def mixed(own: Ints, other: Ints, stored: Sequence[int], share: float) -> Ints:
    """One choice with a share of the parameters stored as the other does, spread evenly.

    >>> mixed(np.zeros(5, int), np.ones(5, int), [1, 2, 3, 4], 1 / 2).tolist()
    [0, 0, 1, 0, 1]
    """
    found = own.copy()
    differ = np.array([v for v in stored if own[v] != other[v]], dtype=np.int64)
    numbers = np.arange(1, len(differ) + 1)
    taken = differ[np.floor(numbers * share) > np.floor((numbers - 1) * share)]
    found[taken] = other[taken]
    return found


@dataclass(eq=False)
class Proof:
    """The bound over all meshes: recomputing only adds work, so what keeps all bounds the rest."""

    seconds: float | None = None

    def propose(self, groups: Sequence[Sequence[Candidate]], ranking: Ranking) -> Iterator[Candidate]:
        """Raise the bound of every mesh, the most hopeful first, and propose what is met."""
        found = [c for group in groups for c in group]
        for candidate in sorted(_one_a_mesh(found), key=lambda c: _best_on(c.case, ranking)):
            bound = CaseBound.of(candidate)
            for known in (*found, *ranking.candidates):
                if known.case.mesh == candidate.case.mesh:
                    bound.meet(np.array(known.choice))
            yield from bound.propose(ranking, np.inf if self.seconds is None else self.seconds)
            if bound.seconds < ranking.best_seconds:
                yield from bound.mix(ranking)
            least = bound.seconds if self.seconds is None else self.seconds
            self.seconds = min(least, bound.seconds)


def _one_a_mesh(found: Sequence[Candidate]) -> list[Candidate]:
    """Of every mesh a candidate that recomputes nothing, where there is one."""
    chosen: dict[str, Candidate] = {}
    for candidate in sorted(found, key=lambda c: bool(c.case.recomputed)):
        chosen.setdefault(str(candidate.case.mesh), candidate)
    return list(chosen.values())


def _best_on(case: Case, ranking: Ranking) -> float:
    """The shortest simulated step on a mesh."""
    steps = (c.seconds for c in ranking.candidates if c.case.mesh == case.mesh)
    return min(steps, default=np.inf)
