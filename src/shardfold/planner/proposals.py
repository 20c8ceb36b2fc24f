"""Choices worth a simulation, each kind by a proposer of its own.

The search minimises a sum, in which nothing overlaps, within a limit on a sum of bytes. A step has
overlap and a peak, so the best sum is not always the best step. A proposer reads the cases that
were searched and the ranking of what was simulated so far, and yields candidates that may win:

    baselines    strategies that have a name, in every degree, on every mesh
    searched     the least additive cost of every case
    overlapping  the same with the communication of parameters at a discount, as if half or nine
                 tenths of it were hidden behind work
    relimited    the same within a limit that is as much lower or higher as the sum of bytes was
                 below or above the simulated peak
    smallest     the fewest bytes, where nothing fits

Each candidate is simulated and ranked before the next is asked for. `partial_recompute`
has a module of its own.

`propose_refined` starts from the winner: one vertex at a time, to whatever lowers a weighted sum.
What wins the simulation is not always the best sum, and what lies near to it was not looked at.
From the winner's choice, every vertex in turn takes the choice that is best beside its neighbours'
until none changes, with all of the communication of parameters counted and with less of it. From a
baseline, which no search has seen, the vertices that gain most also move alone, each move kept if
the simulated step gets shorter. At last some of the parameters, spread evenly over the model, are
stored in parts, or whole: a weight for all of them says nothing of the order in which they queue
for a link, where a few gathers fewer or more can be what a step waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from shardfold.errors import InfeasibleError
from shardfold.planner.case import Candidate, Source, discount, simulate
from shardfold.planner.select import NEARLY, Ranking, least_seconds
from shardfold.search.local_search import added_costs, around, descend
from shardfold.strategies import baselines
from shardfold.strategies.baselines import STRATEGIES, Setting, every

Group = Sequence[Candidate]  # what one search over all meshes found
Proposer = Callable[[Sequence[Group], Ranking], Iterator[Candidate]]

EVERYONE = tuple(STRATEGIES)
KNOWN = ("data-parallel", "fsdp")  # every plan is held against these
WEIGHTS = (0.5, 0.1)  # of the communication of parameters, beside 1
FEW = 2  # candidates for which the search is repeated at a discount
MOST_HIDDEN = 0.8  # of an additive cost: overlap often leaves as much of it, if not less
BINDING = 0.95  # of the limit: a search whose bytes come closer is bound by it
ROUNDS = 3  # of searches within another limit
LITTLE = 0.05  # of the limit: so little below it, the choices that were met on the way will do
SHY = 0.997  # of the limit that a peak just above it asks for, or the next is above it, too
NEAR = 0.98  # of the limit: a peak below leaves room that the search did not see


def propose_baselines(groups: Sequence[Group], ranking: Ranking) -> Iterator[Candidate]:
    """Baselines that may be the best of their name, or of all; first those that keep activations.

    What cannot be faster than one of the same name that fits is left out, and what cannot be
    faster than the best of all, but for the two that everybody knows. Pins leave none.
    """
    for recomputes in (False, True):
        names = partial(_names_for, recomputes, ranking.best_seconds)
        limit = ranking.limit_bytes
        found = [c for group in groups for c in list_baselines(group, limit, names)]
        for candidate in sorted(found, key=lambda c: c.unhidden_seconds):
            same = [c for c in ranking.candidates if c.label == candidate.label]
            rivals = same if candidate.label in KNOWN else ranking.candidates
            if candidate.may_beat(ranking.best_of(rivals)):
                yield candidate


def _names_for(recomputes: bool, best_seconds: float, candidate: Candidate) -> Sequence[str]:
    """The baselines that are of interest for a candidate's case."""
    case = candidate.case
    if case.is_pinned or bool(case.recomputed) != recomputes:
        return ()
    is_hopeless = recomputes and least_seconds(case.unrolled.problem) >= best_seconds
    return KNOWN if is_hopeless else EVERYONE


def list_baselines(
    group: Group, limit: float, names: Callable[[Candidate], Sequence[str]] = lambda _: EVERYONE
) -> Iterator[Candidate]:
    """Every baseline in every degree, on every mesh that allows it.

    What costs and takes the same on two meshes is the same there: a split over all devices.
    """
    seen: set[tuple[str, float, float]] = set()
    for candidate in group:
        case = candidate.case
        setting = Setting(case.graph, case.subdims, case.tables, limit, case.unrolled)
        for name in names(candidate):
            for choice in every(name, setting):
                whole = case.unrolled.extended(choice)
                found = candidate.choosing(whole, Source.BASELINE, name)
                cost, size = found.solution.cost, found.solution.bytes or 0.0
                key = (name, float(f"{cost:.9g}"), float(f"{size:.9g}"))
                if key not in seen:
                    seen.add(key)
                    yield found


def propose_searched(groups: Sequence[Group], ranking: Ranking) -> Iterator[Candidate]:
    """The least additive cost of every case, as long as it may beat the best so far."""
    for group in groups:
        for candidate in _ordered(group):
            if candidate.case.is_pinned or candidate.may_beat(NEARLY * ranking.best_seconds):
                yield candidate


def propose_overlapping(groups: Sequence[Group], ranking: Ranking) -> Iterator[Candidate]:
    """The few best cases with parameters' communication at a discount, if they may win.

    Where the limit binds, more may be hidden than a share of the cost: what the limit leaves
    sends more parameters.
    """
    limit, at = ranking.limit_bytes, ranking.winner
    left = min(MOST_HIDDEN, at.seconds / at.solution.cost)  # what it left of the best, too
    for group in groups:
        few = [c for c in _ordered(group) if not c.case.is_pinned][:FEW]
        least = min((c.unhidden_seconds for c in few), default=0.0)
        for candidate in few:
            found, own, best = candidate.solution, candidate.unhidden_seconds, ranking.best_seconds
            is_hidden = own == least and own + WEIGHTS[-1] * (found.cost - own) < best
            binds = _binds(candidate, limit)
            if left * found.lower_bound <= best or (binds and is_hidden):
                for weight in WEIGHTS[-1:] if binds else WEIGHTS:
                    yield from solve_discounted(candidate, weight, limit)


def propose_relimited(groups: Sequence[Group], ranking: Ranking) -> Iterator[Candidate]:
    """Cases within another limit, where the sum of bytes was not the peak.

    That of the winner; and, at a discount, those whose searches were faster and did not fit.
    """
    limit, at = ranking.limit_bytes, ranking.winner
    if min(ranking.candidates, key=lambda c: c.seconds).peak_bytes <= limit:
        return  # the limit does not bind
    yield from _relimit(at, ranking, _solve_within)
    faster = [c for c in ranking.candidates if c.source is Source.OVERLAP]
    faster = [c for c in faster if c.seconds < ranking.best_seconds and c.peak_bytes > limit]
    by_case = {id(c.case.tables): c for c in sorted([at, *faster], key=lambda c: -c.seconds)}
    for candidate in sorted(by_case.values(), key=lambda c: c.seconds)[:FEW]:
        yield from _relimit(candidate, ranking, _solve_discounted)


Solve = Callable[[Candidate, float, int | None], Iterator[Candidate]]


def _relimit(start: Candidate, ranking: Ranking, solve: Solve) -> Iterator[Candidate]:
    """Solve a case within limits that are as much lower or higher as its peak was off."""
    at, limit, rooms = start, ranking.limit_bytes, set[float]()
    for _ in range(ROUNDS):
        case, peak, total = at.case, at.peak_bytes, at.solution.bytes or 0.0
        if not total or NEAR * limit <= peak <= limit:
            return
        fixed = case.fixed_bytes
        share = total / (peak - fixed) * (SHY if peak > limit else 1.0)
        room = fixed + (limit - fixed) * share
        if room in rooms:
            return  # as far as this goes
        rooms.add(room)
        count = len(ranking.candidates)
        yield from solve(at, room, 0 if room >= (1 - LITTLE) * limit else None)
        if count == len(ranking.candidates):
            return
        at = ranking.candidates[-1]


def propose_smallest(groups: Sequence[Group], ranking: Ranking) -> Iterator[Candidate]:
    """The fewest bytes of every case, where nothing fits."""
    if not ranking.has_fitting:
        yield from list_smallest(groups)


def list_smallest(groups: Sequence[Group]) -> Iterator[Candidate]:
    """The fewest bytes of every case."""
    for candidate in (c for group in groups for c in group):
        found = candidate.case.solve_smallest()
        yield candidate.choosing(found.choice, Source.SMALLEST, "least memory")


FIRST: tuple[Proposer, ...] = (propose_baselines, propose_searched)
FURTHER: tuple[Proposer, ...] = (propose_overlapping, propose_relimited, propose_smallest)
PROPOSERS = (*FIRST, *FURTHER)


def solve_discounted(
    candidate: Candidate, weight: float, limit: float, rounds: int | None = None
) -> Iterator[Candidate]:
    """The best choice within the limit if so much of the parameters' communication counts."""
    case, spend = candidate.case, candidate.case.patience.spend
    room = limit - case.fixed_bytes
    left = case.discounted(weight)
    try:
        # Where the plain sum is far from the limit, so is this one as a rule, and need not look.
        fastest = None if _binds(candidate, limit) else spend(lambda s: left.solve(seconds=s))
        found = spend(
            lambda s: left.solve(room, fastest=fastest, known=case.known, rounds=rounds, seconds=s)
        )
    except InfeasibleError:
        return
    yield candidate.choosing(found.choice, Source.OVERLAP, f"search, {1 - weight:.0%} overlap")


def _solve_discounted(
    candidate: Candidate, limit: float, rounds: int | None
) -> Iterator[Candidate]:
    """The same where most of the parameters' communication is hidden."""
    yield from solve_discounted(candidate, WEIGHTS[-1], limit, rounds)


def _solve_within(candidate: Candidate, limit: float, rounds: int | None) -> Iterator[Candidate]:
    """The least additive cost of a case within another limit."""
    case = candidate.case
    try:
        found = case.solve_within(limit, rounds=rounds)
    except InfeasibleError:
        return
    yield candidate.choosing(found.choice, Source.SEARCH, "search")


def _binds(candidate: Candidate, limit: float) -> bool:
    return candidate.summed_bytes > BINDING * limit


def _ordered(group: Group) -> list[Candidate]:
    return sorted((c for c in group if c.feasible), key=lambda c: c.solution.cost)


SWEEPS = 8
REFINE_ROUNDS = 3
MOVES = 24  # of single vertices that are simulated
SHARES = (1 / 6, 1 / 4, 1 / 2, 1.0)  # of the parameters that are stored another way
WORTH = 0.02  # of a step: less waiting for links than this is not worth other storages
GAIN = 0.001  # of a step: a plan with storages of several kinds must be shorter by as much


def propose_refined(groups: Sequence[Group], ranking: Ranking) -> Iterator[Candidate]:
    """Small steps from the winner, as long as they are steps forward."""
    for _ in range(REFINE_ROUNDS):
        before = ranking.winner
        yield from _if_hopeful(_descend(before), ranking)
        if ranking.winner is before:
            break
    if ranking.winner.source is Source.BASELINE:
        yield from _if_hopeful(_move_vertices(ranking), ranking)
    yield from _store_otherwise(ranking.winner)


def _if_hopeful(candidates: Iterator[Candidate], ranking: Ranking) -> Iterator[Candidate]:
    """The candidates that may win."""
    return (c for c in candidates if c.may_beat(NEARLY * ranking.winner.seconds))


def _descend(winner: Candidate) -> Iterator[Candidate]:
    """Where the steps from a choice end, under each weight."""
    tables, own = winner.case.tables, winner.own_choice
    found = {own}
    for weight in (1.0, *WEIGHTS):
        problem = discount(tables, tables.problem, weight)
        choice = tuple(descend(problem, np.array(own), passes=SWEEPS).tolist())
        if choice not in found:
            found.add(choice)
            yield _refine(winner, choice)


def _move_vertices(ranking: Ranking) -> Iterator[Candidate]:
    """The single moves that lower the additive cost most, each from the winner by then."""
    start = ranking.winner
    problem, own = start.case.tables.problem, start.own_choice
    gains, choice = [], np.array(own)
    for vertex, near in enumerate(around(problem)):
        costs = added_costs(problem, vertex, near, choice)
        best = int(np.argmin(costs))
        gains.append((float(costs[own[vertex]] - costs[best]), vertex, best))
    for gain, vertex, best in sorted(gains, reverse=True)[:MOVES]:
        if gain > 0:
            now = list(ranking.winner.own_choice)
            now[vertex] = best
            yield _refine(start, tuple(now))


def _store_otherwise(winner: Candidate) -> Iterator[Candidate]:
    """Some of the winner's parameters stored in parts, or whole, where that is clearly faster."""
    tables, own, simulation = winner.case.tables, winner.own_choice, winner.simulation
    assert simulation is not None
    is_short = len(winner.choice) > len(own)  # what is spread over a few layers
    if is_short or simulation.exposed_seconds < WORTH * winner.seconds:
        return
    others = (baselines.stored_in_parts(tables, own), baselines.stored_whole(tables, own))
    choices = dict.fromkeys(mix(own, other, share) for other in others for share in SHARES)
    found, most = (_refine(winner, c) for c in choices if c != own), (1 - GAIN) * winner.seconds
    hopeful = (simulate(candidate) for candidate in found if candidate.may_beat(most))
    yield from (candidate for candidate in hopeful if candidate.seconds < most)


def mix(own: Sequence[int], other: Sequence[int], share: float) -> tuple[int, ...]:
    """One choice with a share of what the other has different, spread evenly.

    >>> mix((0, 0, 0, 0, 0), (1, 1, 0, 1, 1), 1 / 2)
    (0, 1, 0, 0, 1)
    """
    found, seen = list(own), 0
    for vertex, choice in enumerate(other):
        if choice != own[vertex]:
            seen += 1
            if int(seen * share) > int((seen - 1) * share):
                found[vertex] = choice
    return tuple(found)


def _refine(start: Candidate, choice: tuple[int, ...]) -> Candidate:
    whole = start.case.unrolled.extended(choice)
    is_refined = start.source is Source.REFINED
    label = start.label if is_refined else f"{start.label}, refined"
    return start.choosing(whole, Source.REFINED, label)
