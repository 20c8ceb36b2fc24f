"""Choices worth a simulation: the search's own under several overlap weights, and those by hand.

The search minimises a sum, in which nothing overlaps. In a step, gathers of parameters and
reductions of gradients run beside the work, so the best sum is not always the best step. The
search is therefore repeated with the communication of parameters at a discount: at 1 all of it
counts, at 0.1 nearly all of it is thought to be hidden. Strategies by hand are always looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardfold.costs import Tabulated
from shardfold.costs.steps import Values
from shardfold.costs.unroll import Ints
from shardfold.errors import InfeasibleError
from shardfold.graph import Graph
from shardfold.planner.mesh_search import Candidate
from shardfold.search import Problem, solve, unproven
from shardfold.sharding import Subdims
from shardfold.strategies.named import STRATEGIES, Setting, every

WEIGHTS = (0.5, 0.1)  # of the communication of parameters, beside 1
FEW = 2  # candidates for which the search is repeated
MOST_HIDDEN = 0.8  # of a sum: overlap often leaves as much of it
BINDING = 0.95  # of the limit: a search whose bytes come closer is bound by it
SEARCH = "search"
OVERLAP = f"{SEARCH}, overlap"
EVERYONE = tuple(STRATEGIES)


@dataclass(frozen=True, slots=True)
class Field:
    """Candidates for one graph of a model: its runs may be in one part or in two."""

    graph: Graph
    subdims: Subdims
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Finalist:
    """A choice for the whole model on one mesh, and who proposed it."""

    name: str
    candidate: Candidate  # with the choice as its solution
    field: Field

    @property
    def is_by_hand(self) -> bool:
        """Whether it is a strategy that has a name."""
        return not self.name.startswith(SEARCH)


def searched(field: Field) -> Iterator[Finalist]:
    """The candidates' own solutions, the best sum first."""
    for candidate in _ordered(field):
        yield Finalist(SEARCH, candidate, field)


def discounted(
    field: Field, limit: float, best: Callable[[], float], floor: Callable[[Finalist], float]
) -> Iterator[Finalist]:
    """The few best candidates under other weights, as long as they may beat the best so far.

    `floor` is what of a choice's sum no overlap can hide. Where the limit binds, more may be
    hidden than a share of the sum: what the limit leaves sends more parameters.
    """
    few = [c for c in _ordered(field) if not c.left.kept][:FEW]
    hidden = {id(c): floor(Finalist(SEARCH, c, field)) for c in few}
    least = min(hidden.values(), default=0.0)
    for candidate in few:
        own, binds = hidden[id(candidate)], _binds(candidate, limit)
        is_hidden = own == least and own + WEIGHTS[-1] * (candidate.solution.cost - own) < best()
        if MOST_HIDDEN * candidate.solution.lower_bound <= best() or (binds and is_hidden):
            for weight in WEIGHTS[-1:] if binds else WEIGHTS:
                found = weighted(field, candidate, weight, limit)
                if found is not None:
                    yield found


def _binds(candidate: Candidate, limit: float) -> bool:
    return (candidate.solution.bytes or 0.0) > BINDING * limit


def _ordered(field: Field) -> list[Candidate]:
    return sorted((c for c in field.candidates if c.feasible), key=lambda c: c.solution.cost)


def weighted(
    field: Field,
    candidate: Candidate,
    weight: float,
    limit: float,
    rounds: int | None = None,
) -> Finalist | None:
    """The best choice within the limit if so much of the parameters' communication counts."""
    problem = at_weight(candidate.tabulated, candidate.unfolded.problem, weight)
    try:
        # Where the plain sum is far from the limit, so is this one as a rule, and need not look.
        fastest = None if _binds(candidate, limit) else solve(problem)
        known = candidate.known
        found = solve(problem, memory_limit=limit, fastest=fastest, known=known, rounds=rounds)
    except InfeasibleError:
        return None
    return proposed(f"{OVERLAP} {1 - weight:.0%}", field, candidate, found.choice)


def within(
    field: Field, candidate: Candidate, limit: float, rounds: int | None = None
) -> Finalist | None:
    """The best choice within another limit."""
    try:
        found = candidate.left.solve(limit, known=candidate.known, rounds=rounds)
        return proposed(SEARCH, field, candidate, found.choice)
    except InfeasibleError:
        return None


def smallest(field: Field, candidate: Candidate) -> Finalist:
    """The choice with the least bytes."""
    found = candidate.left.smallest()
    return proposed(f"{SEARCH}, smallest", field, candidate, found.choice)


def by_hand(
    field: Field, limit: float, names: Callable[[Candidate], Sequence[str]] = lambda _: EVERYONE
) -> Iterator[Finalist]:
    """Every strategy by hand, in every degree, on every mesh that allows it.

    What costs and takes the same on two meshes is the same there: a split over all devices.
    `names` says which strategies are of interest for a candidate.
    """
    seen: set[tuple[str, float, float]] = set()
    for candidate in field.candidates:
        unfolded = candidate.unfolded
        setting = Setting(field.graph, field.subdims, candidate.tabulated, limit, unfolded)
        for name in names(candidate):
            for choice in every(name, setting):
                found = proposed(name, field, candidate, unfolded.extended(choice))
                price = found.candidate.solution
                key = (name, float(f"{price.cost:.9g}"), float(f"{price.bytes or 0.0:.9g}"))
                if key not in seen:
                    seen.add(key)
                    yield found


def proposed(
    name: str, field: Field, candidate: Candidate, choice: Sequence[int] | Ints
) -> Finalist:
    """A choice in the shape of a solution, priced by the plain sum."""
    whole = np.array(choice)
    candidate.known.append(whole)
    bound = candidate.solution.lower_bound
    solution = unproven(candidate.unfolded.problem, whole, name, bound)
    return Finalist(name, replace(candidate, solution=solution), field)


def at_weight(tables: Tabulated, problem: Problem, weight: float) -> Problem:
    """A problem made of these tables, with the edges of parameters at a part of their cost."""
    scaled: dict[int, Values] = {
        id(costs): costs * weight
        for edge, costs in zip(tables.edges, tables.problem.edge_costs, strict=True)
        if edge.regathers is not None
    }
    costs = tuple(scaled.get(id(table), table) for table in problem.edge_costs)
    return replace(problem, edge_costs=costs)
