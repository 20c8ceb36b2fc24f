"""Local refinement of the winner: one vertex at a time, to whatever lowers a weighted sum.

What wins the simulation is not always the best sum, and what lies near to it was not looked at.
From the winner's choice, every vertex in turn takes the choice that is best beside its neighbours'
until none changes, with all of the communication of parameters counted and with less of it. From a
baseline, which no search has seen, the vertices that gain most also move alone, each move kept if
the simulated step gets shorter. At last some of the parameters, spread evenly over the model, are
stored in parts, or whole: a weight for all of them says nothing of the order in which they queue
for a link, where a few gathers fewer or more can be what a step waits for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from shardfold.planner.case import Candidate, Source, discount, simulate
from shardfold.planner.proposals import WEIGHTS, Group
from shardfold.planner.select import Ranking
from shardfold.search.local_search import added_costs, around, descend
from shardfold.strategies import baselines

SWEEPS = 8
ROUNDS = 3
MOVES = 24  # of single vertices that are simulated
SHARES = (1 / 6, 1 / 4, 1 / 2, 1.0)  # of the parameters that are stored another way
WORTH = 0.02  # of a step: less waiting for links than this is not worth other storages
GAIN = 0.001  # of a step: a plan with storages of several kinds must be shorter by as much


def propose_refined(groups: Sequence[Group], ranking: Ranking) -> Iterator[Candidate]:
    """Small steps from the winner, as long as they are steps forward."""
    for _ in range(ROUNDS):
        before = ranking.winner
        yield from _if_hopeful(_descend(before), ranking)
        if ranking.winner is before:
            break
    if ranking.winner.source is Source.BASELINE:
        yield from _if_hopeful(_move_vertices(ranking), ranking)
    yield from _store_otherwise(ranking.winner)


def _if_hopeful(candidates: Iterator[Candidate], ranking: Ranking) -> Iterator[Candidate]:
    """The candidates that may win."""
    return (c for c in candidates if c.floor_seconds < ranking.winner.seconds)


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
    found = [simulate(_refine(winner, choice)) for choice in choices if choice != own]
    yield from (c for c in found if c.seconds < (1 - GAIN) * winner.seconds)


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
