"""Small steps from the winner: one vertex at a time, to whatever lowers a weighted sum.

What wins the simulation is not always the best sum, and what lies near to it was not looked at.
From the winner's choice, every vertex in turn takes the choice that is best beside its neighbours'
until none changes, with all of the communication of parameters counted and with less of it. From a
strategy by hand, which no search has seen, the vertices that gain most also move alone, each move
kept if the simulated step gets shorter. The simulator judges all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from shardfold.costs.steps import Values
from shardfold.plans.finalists import SEARCH, WEIGHTS, Finalist, proposed
from shardfold.plans.judge import Judge, Verdict
from shardfold.search import Problem

SWEEPS = 8
ROUNDS = 3
MOVES = 24  # of single vertices that are simulated

Choice = tuple[int, ...]


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
    tables, own = winner.candidate.tabulated, _own(winner)
    shared = {k for k, edge in enumerate(tables.edges) if edge.regathers is not None}
    found = {own}
    for weight in (1.0, *WEIGHTS):
        edges = [c * weight if k in shared else c for k, c in enumerate(tables.problem.edge_costs)]
        choice = descended(replace(tables.problem, edge_costs=tuple(edges)), own)
        if choice not in found:
            found.add(choice)
            yield _near(winner, choice)


def _moved(verdict: Verdict, judge: Judge) -> Verdict:
    """The verdict after the single moves that lower the sum most."""
    start = verdict.winner.finalist
    problem, own = start.candidate.tabulated.problem, _own(start)
    around = _around(problem)
    gains = []
    for vertex in range(len(problem)):
        total = _beside(problem, around, own, vertex)
        best = int(np.argmin(total))
        gains.append((float(total[own[vertex]] - total[best]), vertex, best))
    for gain, vertex, best in sorted(gains, reverse=True)[:MOVES]:
        if gain > 0:
            now = list(_own(verdict.winner.finalist))
            now[vertex] = best
            verdict = _with(verdict, _near(start, tuple(now)), judge)
    return verdict


def _own(finalist: Finalist) -> Choice:
    """The choice for what is in the tables; the other layers of a run follow."""
    candidate = finalist.candidate
    return tuple(candidate.solution.choice[: len(candidate.tabulated.vertices)])


def _near(start: Finalist, choice: Choice) -> Finalist:
    whole = start.candidate.unfolded.extended(choice)
    return proposed(f"{SEARCH} near {start.name}", start.field, start.candidate, whole)


def descended(problem: Problem, choice: Choice) -> Choice:
    """Where no vertex alone can lower the sum any more."""
    around, current = _around(problem), list(choice)
    for _ in range(SWEEPS):
        before = list(current)
        for vertex in range(len(problem)):
            total = _beside(problem, around, current, vertex)
            best = int(np.argmin(total))
            if total[best] < total[current[vertex]]:
                current[vertex] = best
        if current == before:
            break
    return tuple(current)


def _around(problem: Problem) -> list[list[tuple[Values, int]]]:
    """For each vertex the tables of its edges, by the choice at the other end, and that end."""
    found: list[list[tuple[Values, int]]] = [[] for _ in range(len(problem))]
    for costs, (u, v) in zip(problem.edge_costs, problem.ends.tolist(), strict=True):
        found[u].append((costs.T, v))
        found[v].append((costs, u))
    return found


def _beside(
    problem: Problem,
    around: list[list[tuple[Values, int]]],
    choice: Sequence[int],
    vertex: int,
) -> Values:
    """What each choice of a vertex costs beside its neighbours'."""
    total: Values = problem.costs[vertex].copy()
    for costs, other in around[vertex]:
        total += costs[choice[other]]
    return total
