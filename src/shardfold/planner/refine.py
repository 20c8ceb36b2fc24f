"""Small steps from the winner: one vertex at a time, to whatever lowers a weighted sum.

What wins the simulation is not always the best sum, and what lies near to it was not looked at.
From the winner's choice, every vertex in turn takes the choice that is best beside its neighbours'
until none changes, with all of the communication of parameters counted and with less of it. From a
strategy by hand, which no search has seen, the vertices that gain most also move alone, each move
kept if the simulated step gets shorter. At last some of the parameters, spread evenly over the
model, are stored in parts, or whole: a weight for all of them says nothing of the order in which
they queue for a link, where a few gathers fewer or more can be what a step waits for. The
simulator judges all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from shardfold.planner.proposals import SEARCH, WEIGHTS, Finalist, at_weight, proposed
from shardfold.planner.select import Judge, Verdict
from shardfold.search.local_search import added_costs, around, descend
from shardfold.strategies import baselines

SWEEPS = 8
ROUNDS = 3
MOVES = 24  # of single vertices that are simulated
SHARES = (1 / 6, 1 / 4, 1 / 2, 1.0)  # of the parameters that are stored another way
WORTH = 0.02  # of a step: less waiting for links than this is not worth other storages
GAIN = 0.001  # of a step: a plan with storages of several kinds must be shorter by as much


def polish(verdict: Verdict, judge: Judge) -> Verdict:
    """The verdict after small steps from its winner, as long as they are steps forward."""
    for _ in range(ROUNDS):
        before = verdict.winner
        for finalist in _settled(before.finalist):
            verdict = _with(verdict, finalist, judge)
        if verdict.winner is before:
            break
    if verdict.winner.finalist.is_by_hand:
        verdict = _moved(verdict, judge)
    return _stored(verdict, judge)


def _with(verdict: Verdict, finalist: Finalist, judge: Judge) -> Verdict:
    """The verdict with one more finalist, if it may win."""
    if judge.floor_seconds(finalist) >= verdict.winner.rank:
        return verdict
    return judge.among(verdict, judge.judged([finalist]))


def _settled(winner: Finalist) -> Iterator[Finalist]:
    """Where the steps from a choice end, under each weight."""
    tables, own = winner.candidate.tabulated, winner.candidate.own_choice
    found = {own}
    for weight in (1.0, *WEIGHTS):
        problem = at_weight(tables, tables.problem, weight)
        choice = tuple(descend(problem, np.array(own), passes=SWEEPS).tolist())
        if choice not in found:
            found.add(choice)
            yield _near(winner, choice)


def _moved(verdict: Verdict, judge: Judge) -> Verdict:
    """The verdict after the single moves that lower the sum most."""
    start = verdict.winner.finalist
    problem, own = start.candidate.tabulated.problem, start.candidate.own_choice
    gains, choice = [], np.array(own)
    for vertex, near in enumerate(around(problem)):
        costs = added_costs(problem, vertex, near, choice)
        best = int(np.argmin(costs))
        gains.append((float(costs[own[vertex]] - costs[best]), vertex, best))
    for gain, vertex, best in sorted(gains, reverse=True)[:MOVES]:
        if gain > 0:
            now = list(verdict.winner.finalist.candidate.own_choice)
            now[vertex] = best
            verdict = _with(verdict, _near(start, tuple(now)), judge)
    return verdict


def _stored(verdict: Verdict, judge: Judge) -> Verdict:
    """The verdict after storing some of the winner's parameters in parts, or whole."""
    winner, start = verdict.winner, verdict.winner.finalist
    tables, own = start.candidate.tabulated, start.candidate.own_choice
    is_short = len(start.candidate.solution.choice) > len(own)  # what is spread over a few layers
    if is_short or winner.simulation.exposed_seconds < WORTH * winner.rank:
        return verdict
    others = (baselines.stored_in_parts(tables, own), baselines.stored_whole(tables, own))
    choices = dict.fromkeys(mixed(own, other, share) for other in others for share in SHARES)
    judged = judge.judged(_near(start, choice) for choice in choices if choice != own)
    return judge.among(verdict, [j for j in judged if j.rank < (1 - GAIN) * winner.rank])


def mixed(own: Sequence[int], other: Sequence[int], share: float) -> tuple[int, ...]:
    """One choice with a share of what the other has different, spread evenly.

    >>> mixed((0, 0, 0, 0, 0), (1, 1, 0, 1, 1), 1 / 2)
    (0, 1, 0, 0, 1)
    """
    found, seen = list(own), 0
    for vertex, choice in enumerate(other):
        if choice != own[vertex]:
            seen += 1
            if int(seen * share) > int((seen - 1) * share):
                found[vertex] = choice
    return tuple(found)


def _near(start: Finalist, choice: tuple[int, ...]) -> Finalist:
    whole = start.candidate.unfolded.extended(choice)
    return proposed(f"{SEARCH} near {start.name}", start.field, start.candidate, whole)
