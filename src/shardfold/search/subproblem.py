"""A search problem with some choices taken away, and its solutions as ones of the whole problem.

Only tables are sliced; equal slices of one table stay one array, so that what folds still folds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from shardfold.search.branch_and_bound import SECONDS
from shardfold.search.interning import Array, Ints
from shardfold.search.problem import Problem
from shardfold.search.solution import Solution
from shardfold.search.solve import solve

Kept = Mapping[int, Ints]  # per vertex the choices that are left; a vertex that is absent has all


@dataclass(frozen=True, slots=True)
class Subproblem:
    """A problem whose vertices have only the choices `kept`."""

    problem: Problem
    kept: Kept
    unlimited: list[Solution] = field(default_factory=list, compare=False, repr=False)

    def solve(
        self,
        limit_bytes: float | None = None,
        *,
        fastest: Solution | None = None,
        cutoff: float = inf,
        known: list[Ints] | None = None,
        rounds: int | None = None,
        seconds: float = SECONDS,
    ) -> Solution:
        """The best choice that is left, numbered as in the whole problem.

        What is found without a limit is kept, and is the answer for every limit that it meets.

        `fastest`, the solution without a limit, `cutoff`, a cost that another problem reaches,
        `known`, choices that may be good, few `rounds` and few `seconds` save time (see
        `search.solve`).
        """
        room = inf if limit_bytes is None else limit_bytes
        for found in self.unlimited:
            if (found.bytes or 0.0) <= room:
                return found
        if self.kept:  # those choices are numbered as in the whole problem
            fastest, known, rounds = None, None, None
        found = solve(
            self.problem,
            memory_limit=limit_bytes,
            fastest=fastest,
            cutoff=cutoff,
            known=known,
            rounds=rounds,
            seconds=seconds,
        )
        whole = self._in_whole(found)
        if limit_bytes is None:
            self.unlimited.append(whole)
        return whole

    def solve_smallest(self, seconds: float = SECONDS) -> Solution:
        """The choice with the fewest bytes, numbered as in the whole problem."""
        return self._in_whole(solve(self.problem.blended(0.0, 1.0), seconds=seconds))

    def _in_whole(self, found: Solution) -> Solution:
        choice = list(found.choice)
        for vertex, rows in self.kept.items():
            choice[vertex] = int(rows[choice[vertex]])
        return replace(found, choice=tuple(choice))


def restrict(problem: Problem, kept: Kept) -> Subproblem:
    """The problem with the choices `kept` alone."""
    cut = _Cut(kept)
    edges, has_edge_bytes = problem.edges, problem.edge_bytes is not None
    narrow = Problem(
        tuple(cut.vector(v, table) for v, table in enumerate(problem.costs)),
        edges,
        tuple(map(cut.table, edges, problem.edge_costs)),
        None if problem.bytes is None else tuple(map(cut.vector, *_numbered(problem.bytes))),
        tuple(map(cut.table, edges, problem.edge_bytes or ())) if has_edge_bytes else None,
        problem.names,
    )
    return Subproblem(narrow, dict(kept))


def _numbered(tables: tuple[Array, ...]) -> tuple[range, tuple[Array, ...]]:
    return range(len(tables)), tables


class _Cut:
    """Slices of tables, each made once."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.names = {v: rows.tobytes() for v, rows in kept.items()}
        self.known: dict[object, Array] = {}

    def vector(self, v: int, table: Array) -> Array:
        if v not in self.kept:
            return table
        key = (id(table), self.names[v])
        if key not in self.known:
            self.known[key] = table[self.kept[v]]
        return self.known[key]

    def table(self, ends: tuple[int, int], table: Array) -> Array:
        u, v = ends
        if u not in self.kept and v not in self.kept:
            return table
        key = (id(table), self.names.get(u), self.names.get(v))
        if key not in self.known:
            cut = table if u not in self.kept else table[self.kept[u]]
            cut = cut if v not in self.kept else cut[:, self.kept[v]]
            self.known[key] = np.ascontiguousarray(cut)
        return self.known[key]
