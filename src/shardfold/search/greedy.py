"""Greedy: each vertex in turn takes what is cheapest next to the vertices before it."""

from __future__ import annotations

import numpy as np

from shardfold.search.problem import Problem
from shardfold.search.solution import Answer


def greedy(problem: Problem) -> Answer:
    """One pass in vertex order, never looking ahead. Work: the entries of one row per edge."""
    before: list[list[tuple[int, int]]] = [[] for _ in range(len(problem))]
    for number, (u, v) in enumerate(problem.ends.tolist()):
        before[max(u, v)].append((number, min(u, v)))
    choice = np.zeros(len(problem), np.int64)
    for vertex, earlier in enumerate(before):
        score = problem.costs[vertex]
        for number, other in earlier:
            table = problem.edge_costs[number]
            is_source = other == problem.ends[number, 0]
            score = score + (table if is_source else table.T)[choice[other]]
        choice[vertex] = int(np.argmin(score))
    return Answer(choice, -np.inf)
