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
from functools import cached_property
from itertools import permutations
from math import inf

import numpy as np

from shardfold.costs.decision_graph import Vertex
from shardfold.costs.demands import ROUNDING, Demands
from shardfold.costs.held import MOMENTS, Held, Trade
from shardfold.costs.steps import Values
from shardfold.costs.unroll import Ints
from shardfold.planner.case import Candidate, Case, Source
from shardfold.planner.select import Ranking
from shardfold.search.interning import Array
from shardfold.search.subproblem import Subproblem, restrict
from shardfold.search.weights import Strongest, WeightSet

LABEL = "search with overlap"
ROUNDS = 8  # of solves on a mesh, at most, the first time
AGAIN = 4  # of solves on a mesh where a bound is raised further, at most
SHARES = (1 / 4, 1 / 2, 3 / 4)  # of the parameters that are stored another way
FEW = 4  # choices that are mixed with one another
DEAREST = 4.0  # times the cost of a choice: what all of a device's memory may be worth


@dataclass(eq=False)
class CaseBound:
    """The bound for one mesh, and the choices that were met.

    Weights are those of the bounds of `Demands`, and then a price for the bytes at each moment of
    `Held`, in seconds for all that a device may hold: no peak exceeds the limit, so a choice that
    fits gains by no price.
    """

    candidate: Candidate  # any of the case
    limit_bytes: float
    demands: Demands
    held: Held
    strongest: Strongest
    choices: list[Ints] = field(default_factory=list)
    known: set[bytes] = field(default_factory=set)  # choices that guide the weights

    @classmethod
    def of(
        cls, candidate: Candidate, limit_bytes: float = inf, like: CaseBound | None = None
    ) -> CaseBound:
        """Nothing is proven yet; without a limit, nothing has a price.

        The best weights of one that is like it, on another mesh, are those to begin with.
        """
        case = candidate.case
        demands, optimizer = case.demands, case.request.optimizer
        held = Held(case.graph, case.subdims, case.tables, optimizer, case.fixed_bytes)
        bounds, priced = demands.bounds, MOMENTS if limit_bytes < inf else 0
        host = len(bounds.sums) - 1
        most = tuple((host + 1 + k, DEAREST * candidate.solution.cost) for k in range(priced))
        allowed = WeightSet(bounds.groups, host, most)
        begin = None if like is None else like.weights_within(allowed)
        return cls(candidate, limit_bytes, demands, held, Strongest(allowed, weights=begin))

    @property
    def case(self) -> Case:
        """The graph on its mesh."""
        return self.candidate.case

    @property
    def seconds(self) -> float:
        """No plan of the case has a shorter step."""
        return max(self.strongest.bound * (1 - ROUNDING), 0.0)

    def weights_within(self, allowed: WeightSet) -> Array | None:
        """The best weights so far, if they are of that set with its prices."""
        mine, weights = self.strongest.allowed, self.strongest.weights
        if weights is None or (mine.groups, mine.count) != (allowed.groups, allowed.count):
            return None
        found = weights.copy()
        for number, most in allowed.most:
            found[number] = min(found[number], most)
        return found

    def least(self, choice: Ints) -> float:
        """A step that this one choice does not fall below."""
        return self.demands.least_seconds(self.case.unrolled, choice)

    def meet(self, choice: Ints) -> None:
        """Let a choice that somebody else found guide the weights, with much kept or run again."""
        if choice.tobytes() in self.known:
            return
        self.known.add(choice.tobytes())
        asked = self.demands.of(self.case.unrolled, choice)
        for trades in self._known_trades:
            self.strongest.met.append(self._point(choice, asked, trades))

    def propose(self, ranking: Ranking, enough: float) -> Iterator[Candidate]:
        """Raise the bound until it is `enough`; each choice met that may win is a candidate.

        A few choices are met whatever is enough: they and their mixtures may be shorter steps.
        """
        for _ in range(AGAIN if self.choices else ROUNDS):
            count = len(self.choices)
            top = min(enough if count >= FEW else inf, ranking.best_seconds)
            self.strongest.raise_bound(self._solve, enough=top, rounds=1)
            if len(self.choices) == count:
                return
            choice = self.choices[-1]
            if self.least(choice) < ranking.best_seconds and self._may_fit(choice):
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
            if least < ranking.best_seconds and self._may_fit(distinct[key]):
                yield self._candidate(distinct[key])

    @property
    def _vertices(self) -> Sequence[Vertex]:
        vertices, copied = self.case.tables.vertices, self.case.unrolled.vertices
        return vertices if copied is None else [vertices[v] for v in copied.tolist()]

    def _candidate(self, choice: Ints) -> Candidate:
        return self.candidate.choosing(choice, Source.OVERLAP, LABEL)

    # Bytes

    @property
    def _may_recompute(self) -> bool:
        return self.limit_bytes < inf and self.case.request.recompute != "never"

    @cached_property
    def _again(self) -> dict[int, Values]:
        """What it adds to each bound to run an operator again."""
        ops = {op for cell in self.held.cells for op in cell.operators}
        return {op: self.demands.again(op) for op in ops}

    @cached_property
    def _known_trades(self) -> list[list[Trade]]:
        """What is kept if memory is cheap, and if all of it is worth a step."""
        weights = np.zeros(len(self.demands.bounds.sums))
        weights[[group[0] for group in self.demands.bounds.groups]] = 1.0
        prices = (0.0, self.candidate.solution.cost) if self.limit_bytes < inf else (0.0,)
        return [self._traded(weights, price) for price in prices]

    def _traded(self, weights: Array, price: float) -> list[Trade]:
        """What is kept at a price for all memory, and what runs again, at the least cost.

        Where the case itself says what runs again, nothing is known to be kept.
        """
        if self.case.recomputed or self.limit_bytes == inf:
            return []
        running = {
            op: float(weights @ more) if self._may_recompute else inf
            for op, more in self._again.items()
        }
        return list(self.held.trade(price / self.limit_bytes, running))

    def _point(self, choice: Ints, asked: Values, trades: Sequence[Trade]) -> Array:
        """The bounds of a choice with some operators run again, and how far bytes are too many."""
        sums = self.demands.bounded(asked)
        if self.limit_bytes == inf:
            return sums
        bytes_ = self.held.fixed + self._stored_bytes(choice)
        for trade in trades:
            bytes_[0] += trade.times * trade.bytes
            for op in trade.again:
                sums = sums + trade.times * self._again[op]
        over = (bytes_ - self.limit_bytes) / self.limit_bytes
        return np.concatenate([sums, over])

    def held_bytes(self, choice: Ints) -> Values:
        """What a choice surely holds at each moment, if nothing is run again."""
        total = self.held.fixed + self._stored_bytes(choice)
        total[0] += 0.0 if self.case.recomputed else self.held.kept_bytes()
        return total

    def _may_fit(self, choice: Ints) -> bool:
        """Whether a choice fits, if enough is run again."""
        stored = self.held.fixed + self._stored_bytes(choice)
        return bool((stored <= self.limit_bytes).all())

    def _stored_bytes(self, choice: Ints) -> Values:
        """Bytes of all parameters at each moment."""
        total = np.zeros(MOMENTS)
        copied = self.case.unrolled.vertices
        for position, v in enumerate(range(len(choice)) if copied is None else copied.tolist()):
            table = self.held.stored[v]
            if table is not None:
                total += table[:, choice[position]]
        return total

    # Solves

    def _solve(self, weights: Array) -> tuple[Array, float]:
        case, count = self.case, len(self.demands.bounds.sums)
        own, prices = weights[:count], weights[count:]
        more = self._priced(prices) if len(prices) else {}
        problem = case.unrolled.like(self.demands.weighted(own, more))
        kept = case.allowed.kept
        left = restrict(problem, kept) if kept else Subproblem(problem, {})
        found = case.patience.spend(lambda seconds: left.solve(seconds=seconds))
        choice = np.array(found.choice)
        self.choices.append(choice)
        asked = self.demands.of(case.unrolled, choice)
        if not len(prices):
            return self._point(choice, asked, ()), found.lower_bound
        trades = self._traded(own, float(prices[0]))
        activations = sum(trade.times * trade.cost for trade in trades)
        constant = float(prices @ (self.held.fixed / self.limit_bytes - 1))
        return self._point(choice, asked, trades), found.lower_bound + activations + constant

    def _priced(self, prices: Array) -> dict[int, Values]:
        """What the bytes of each parameter's storages cost."""
        return {
            v: prices @ table / self.limit_bytes
            for v, table in enumerate(self.held.stored)
            if table is not None
        }


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


Group = Sequence[Candidate]  # what one search over all meshes found


@dataclass(eq=False)
class Proof:
    """The bound over all meshes: recomputing only adds work, so what keeps all bounds the rest.

    What was proven is kept: the next time, all that was simulated since guides it further.
    """

    seconds: float | None = None
    bounds: dict[str, CaseBound] = field(default_factory=dict)  # by the mesh

    def is_met_by(self, ranking: Ranking) -> bool:
        """Whether the best is proven to be as short as any step, nearly."""
        return self.seconds is not None and ranking.is_met(self.seconds)

    def propose(
        self, groups: Sequence[Sequence[Candidate]], ranking: Ranking
    ) -> Iterator[Candidate]:
        """Raise the bound of every mesh, the most hopeful first, and propose what is met."""
        found = [c for group in groups for c in group]
        # A plan that does not fit is selected only where none was found that does.
        limit, least = ranking.limit_bytes if ranking.has_fitting else inf, inf
        for candidate in sorted(_one_a_mesh(found), key=lambda c: _best_on(c.case, ranking)):
            bound, graph = self._bound_on(candidate, limit), candidate.case.graph
            for known in (*found, *ranking.candidates):
                if known.case.graph is graph and known.case.mesh == candidate.case.mesh:
                    bound.meet(np.array(known.choice))
            yield from bound.propose(ranking, least)
            if not ranking.is_met(bound.seconds):
                yield from bound.mix(ranking)
            least = min(least, bound.seconds)
        self.seconds = least

    def _bound_on(self, candidate: Candidate, limit: float) -> CaseBound:
        """Of a candidate's case: the bound proven within the limit so far, or a new one."""
        mesh = str(candidate.case.mesh)
        known = self.bounds.get(mesh)
        if known is None or known.limit_bytes != limit:
            best = max(self.bounds.values(), key=lambda each: each.seconds, default=None)
            self.bounds[mesh] = CaseBound.of(candidate, limit, like=known or best)
        return self.bounds[mesh]


def _one_a_mesh(found: Sequence[Candidate]) -> list[Candidate]:
    """Of every mesh a candidate that recomputes nothing, where there is one."""
    chosen: dict[str, Candidate] = {}
    for candidate in sorted(found, key=lambda c: bool(c.case.recomputed)):
        chosen.setdefault(str(candidate.case.mesh), candidate)
    return list(chosen.values())


def _best_on(case: Case, ranking: Ranking) -> float:
    """The shortest simulated step on a mesh."""
    steps = (c.seconds for c in ranking.candidates if c.case.mesh == case.mesh)
    return min(steps, default=inf)
