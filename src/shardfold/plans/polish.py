"""Small steps from the winner: one vertex at a time, to whatever lowers a weighted sum.

What wins the simulation is not always the best sum, and what lies near to it was not looked at.
From the winner's choice, every vertex in turn takes the choice that is best beside its neighbours'
until none changes, with all of the communication of parameters counted and with less of it. From a
strategy by hand, which no search has seen, the vertices that gain most also move alone, each move
kept if the simulated step gets shorter. The simulator judges all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardfold.plans.finalists import SEARCH, WEIGHTS, Finalist, at_weight, proposed
from shardfold.plans.judge import Judge, Verdict
from shardfold.search.descent import added_costs, around, descend

SWEEPS = 8
ROUNDS = 3
MOVES = 24  # of single vertices that are simulated


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
    return verdict


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
    gains = []
    for vertex, near in enumerate(around(problem)):
        costs = added_costs(problem, vertex, near, np.array(own))
        best = int(np.argmin(costs))
        gains.append((float(costs[own[vertex]] - costs[best]), vertex, best))
    for gain, vertex, best in sorted(gains, reverse=True)[:MOVES]:
        if gain > 0:
            now = list(verdict.winner.finalist.candidate.own_choice)
            now[vertex] = best
            verdict = _with(verdict, _near(start, tuple(now)), judge)
    return verdict


def _near(start: Finalist, choice: tuple[int, ...]) -> Finalist:
    whole = start.candidate.unfolded.extended(choice)
    return proposed(f"{SEARCH} near {start.name}", start.field, start.candidate, whole)
