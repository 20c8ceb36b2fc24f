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

from shardfold.costs.steps import Values
from shardfold.costs.unfold import Ints
from shardfold.errors import InfeasibleError
from shardfold.graph import Graph
from shardfold.plans.choose import Candidate
from shardfold.plans.restrict import Restricted
from shardfold.plans.strategies import STRATEGIES, Setting, Unfit
from shardfold.search import Problem, Solution, solve
from shardfold.search.solution import Statistics
from shardfold.spaces import Atoms

WEIGHTS = (0.5, 0.1)  # of the communication of parameters, beside 1
FEW = 3  # candidates for which the search is repeated
SEARCH = "search"


@dataclass(frozen=True, slots=True)
class Finalist:
    """A choice for the whole model on one mesh, and who proposed it."""

    name: str
    candidate: Candidate  # with the choice as its solution

    @property
    def by_hand(self) -> bool:
        """Whether it is a strategy that has a name."""
        return not self.name.startswith(SEARCH)


def searched(candidates: Sequence[Candidate], limit: float) -> Iterator[Finalist]:
    """The candidates' own solutions, and those of the few best under other weights."""
    ordered = sorted(candidates, key=lambda c: (not c.feasible, c.solution.cost))
    for candidate in ordered:
        if candidate.feasible:
            yield Finalist(SEARCH, candidate)
    for candidate in [c for c in ordered if c.feasible and not c.left.kept][:FEW]:
        for weight in WEIGHTS:
            found = weighted(candidate, weight, limit)
            if found is not None:
                yield found


def weighted(candidate: Candidate, weight: float, limit: float) -> Finalist | None:
    """The best choice within the limit if so much of the parameters' communication counts."""
    problem = _discounted(candidate, weight)
    try:
        found = solve(problem)
        if (found.bytes or 0.0) > limit:
            found = solve(problem, memory_limit=limit)
    except InfeasibleError:
        return None
    return _proposed(f"{SEARCH}, overlap {1 - weight:.0%}", candidate, found.choice)


def within(candidate: Candidate, limit: float) -> Finalist | None:
    """The best choice within another limit."""
    try:
        return _proposed(SEARCH, candidate, candidate.left.solve(limit).choice)
    except InfeasibleError:
        return None


def smallest(candidate: Candidate) -> Finalist:
    """The choice with the least bytes."""
    problem = candidate.left.problem
    assert problem.bytes is not None
    assert problem.edge_bytes is not None
    least = Problem(problem.bytes, problem.edges, problem.edge_bytes, problem.bytes)
    found = Restricted(least, candidate.left.kept).solve()
    return _proposed(f"{SEARCH}, smallest", candidate, found.choice)


def by_hand(
    candidates: Sequence[Candidate], graph: Graph, atoms: Atoms, limit: float
) -> Iterator[Finalist]:
    """Every strategy by hand, on every mesh that allows it."""
    for candidate in candidates:
        setting = Setting(graph, atoms, candidate.tabulated, limit)
        for name, strategy in STRATEGIES.items():
            choice = strategy(setting)
            if not isinstance(choice, Unfit):
                yield _proposed(name, candidate, candidate.unfolded.extended(choice))


def _proposed(name: str, candidate: Candidate, choice: Sequence[int] | Ints) -> Finalist:
    """A choice in the shape of a solution, priced by the plain sum."""
    problem = candidate.unfolded.problem
    whole = tuple(np.asarray(choice).tolist())
    cost = problem.total(whole)
    solution = Solution(
        whole,
        cost,
        is_optimal=False,
        lower_bound=min(cost, candidate.solution.lower_bound),
        bytes=problem.total_bytes(whole),
        statistics=Statistics(name),
    )
    return Finalist(name, replace(candidate, solution=solution))


def _discounted(candidate: Candidate, weight: float) -> Problem:
    """The problem with the edges of parameters at a part of their cost."""
    tables, problem = candidate.tabulated, candidate.unfolded.problem
    scaled: dict[int, Values] = {
        id(costs): costs * weight
        for edge, costs in zip(tables.edges, tables.problem.edge_costs, strict=True)
        if edge.regathers is not None
    }
    take: Callable[[Values], Values] = lambda table: scaled.get(id(table), table)  # noqa: E731
    return replace(problem, edge_costs=tuple(map(take, problem.edge_costs)))
