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

Each candidate is simulated and ranked before the next is asked for. Two more proposers have
modules of their own: `partial_recompute`, and `refine`, which starts from the winner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from shardfold.errors import InfeasibleError
from shardfold.planner.case import Candidate, Source, discount
from shardfold.planner.select import Ranking, least_seconds
from shardfold.search.subproblem import Subproblem, restrict
from shardfold.strategies.named import STRATEGIES, Setting, every

Group = Sequence[Candidate]  # what one search over all meshes found
Proposer = Callable[[Sequence[Group], Ranking], Iterator[Candidate]]

EVERYONE = tuple(STRATEGIES)
KNOWN = ("data-parallel", "fsdp")  # every plan is held against these
WEIGHTS = (0.5, 0.1)  # of the communication of parameters, beside 1
FEW = 2  # candidates for which the search is repeated at a discount
MOST_HIDDEN = 0.8  # of an additive cost: overlap often leaves as much of it
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
        for candidate in sorted(found, key=lambda c: c.floor_seconds):
            same = [c for c in ranking.candidates if c.label == candidate.label]
            rivals = same if candidate.label in KNOWN else ranking.candidates
            if all(c.seconds > candidate.floor_seconds for c in ranking.fitting(rivals)):
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
            if candidate.case.is_pinned or candidate.floor_seconds < ranking.best_seconds:
                yield candidate


def propose_overlapping(groups: Sequence[Group], ranking: Ranking) -> Iterator[Candidate]:
    """The few best cases with parameters' communication at a discount, if they may win.

    Where the limit binds, more may be hidden than a share of the cost: what the limit leaves
    sends more parameters.
    """
    limit = ranking.limit_bytes
    for group in groups:
        few = [c for c in _ordered(group) if not c.case.is_pinned][:FEW]
        least = min((c.floor_seconds for c in few), default=0.0)
        for candidate in few:
            found, own, best = candidate.solution, candidate.floor_seconds, ranking.best_seconds
            is_hidden = own == least and own + WEIGHTS[-1] * (found.cost - own) < best
            binds = _binds(candidate, limit)
            if MOST_HIDDEN * found.lower_bound <= best or (binds and is_hidden):
                for weight in WEIGHTS[-1:] if binds else WEIGHTS:
                    yield from solve_discounted(candidate, weight, limit)


def propose_relimited(groups: Sequence[Group], ranking: Ranking) -> Iterator[Candidate]:
    """The winner's case within another limit, where the sum of bytes was not the peak."""
    limit, at = ranking.limit_bytes, ranking.winner
    if min(ranking.candidates, key=lambda c: c.seconds).peak_bytes <= limit:
        return  # the limit does not bind
    for _ in range(ROUNDS):
        case, peak, total = at.case, at.peak_bytes, at.solution.bytes or 0.0
        if not total or NEAR * limit <= peak <= limit:
            return
        room = limit * total / peak * (SHY if peak > limit else 1.0)
        rounds = 0 if room >= (1 - LITTLE) * limit else None
        was_discounted = any(
            c.case.tables is case.tables and c.source is Source.OVERLAP for c in ranking.candidates
        )
        count = len(ranking.candidates)
        yield from _solve_within(at, room, rounds)
        few = rounds if was_discounted else None
        yield from solve_discounted(at, WEIGHTS[-1], room, few)
        if count == len(ranking.candidates):
            return
        at = min(ranking.candidates[count:], key=ranking.order)


def propose_smallest(groups: Sequence[Group], ranking: Ranking) -> Iterator[Candidate]:
    """The fewest bytes of every case, where nothing fits."""
    if not ranking.has_fitting:
        yield from list_smallest(groups)


def list_smallest(groups: Sequence[Group]) -> Iterator[Candidate]:
    """The fewest bytes of every case."""
    for candidate in (c for group in groups for c in group):
        found = candidate.case.allowed.solve_smallest()
        yield candidate.choosing(found.choice, Source.SMALLEST, "least memory")


PROPOSERS: tuple[Proposer, ...] = (
    propose_baselines,
    propose_searched,
    propose_overlapping,
    propose_relimited,
    propose_smallest,
)


def solve_discounted(
    candidate: Candidate, weight: float, limit: float, rounds: int | None = None
) -> Iterator[Candidate]:
    """The best choice within the limit if so much of the parameters' communication counts."""
    case = candidate.case
    problem = discount(case.tables, case.unrolled.problem, weight)
    left = restrict(problem, case.allowed.kept) if case.is_pinned else Subproblem(problem, {})
    try:
        # Where the plain sum is far from the limit, so is this one as a rule, and need not look.
        fastest = None if _binds(candidate, limit) else left.solve()
        found = left.solve(limit, fastest=fastest, known=case.known, rounds=rounds)
    except InfeasibleError:
        return
    yield candidate.choosing(found.choice, Source.OVERLAP, f"search, {1 - weight:.0%} overlap")


def _solve_within(candidate: Candidate, limit: float, rounds: int | None) -> Iterator[Candidate]:
    """The least additive cost of a case within another limit."""
    case = candidate.case
    try:
        found = case.allowed.solve(limit, known=case.known, rounds=rounds)
    except InfeasibleError:
        return
    yield candidate.choosing(found.choice, Source.SEARCH, "search")


def _binds(candidate: Candidate, limit: float) -> bool:
    return (candidate.solution.bytes or 0.0) > BINDING * limit


def _ordered(group: Group) -> list[Candidate]:
    return sorted((c for c in group if c.feasible), key=lambda c: c.solution.cost)
