"""The search problem of a whole model, from the tables of a graph that holds a few periods.

A missing period is a copy of the model period: the same tables at new vertices, joined to its
neighbours by the edges that join the model period to the next one. Only numbers are made, no
tables, so a thousand periods cost a few arrays.

    graph:   before - model - next
    problem: before - model - copy - copy - ... - copy - next
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardfold.costs.decision_graph import Place, Vertex
from shardfold.costs.tables import Tables
from shardfold.graph import Graph, Repeat
from shardfold.graph.repeats import MODEL
from shardfold.search import Problem

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Copies:
    """The vertices of one run: those of each traced period, in one order, and of the copies."""

    repeat: Repeat
    traced: Ints  # (traced periods, vertices of a period)
    copies: Ints  # (missing periods, vertices of a period)

    def rows(self, choice: Ints) -> Ints:
        """The choices of every period, in execution order."""
        head, tail = choice[self.traced[: MODEL + 1]], choice[self.traced[MODEL + 1 :]]
        return np.concatenate([head, choice[self.copies], tail])


@dataclass(frozen=True, slots=True)
class UnrolledProblem:
    """The problem of the whole model; its first vertices are those of the tables."""

    problem: Problem
    runs: tuple[Copies, ...] = ()
    vertices: Ints | None = None  # of the tables, which each one copies; none where there are none
    edges: Ints | None = None

    def like(self, own: Problem) -> Problem:
        """The problem of the whole model, from another one of the graph's own decisions."""
        if self.vertices is None or self.edges is None:
            return own
        return own.spread(self.vertices, self.problem.ends, self.edges)

    def extended(self, choice: tuple[int, ...]) -> Ints:
        """A choice for the graph's own vertices, with every copy choosing as its model does."""
        full = np.zeros(len(self.problem), dtype=np.int64)
        full[: len(choice)] = choice
        for run in self.runs:
            full[run.copies] = full[run.traced[MODEL]]
        return full


def unroll(tables: Tables, graph: Graph) -> UnrolledProblem:
    """The problem with all periods of every run."""
    if not graph.repeats:
        return UnrolledProblem(tables.problem)
    builder = _Builder(tables)
    runs = tuple(builder.insert(repeat, graph) for repeat in graph.repeats)
    return UnrolledProblem(builder.problem(), runs, builder.vertices, builder.edges)


class _Builder:
    """A problem as growing lists: which table stands at each vertex and each edge."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        problem = tables.problem
        self.vertices = np.arange(len(problem))  # the vertex whose tables each one has
        self.edges = np.arange(len(problem.edges))
        self.ends = np.array(problem.edges, dtype=np.int64).reshape(-1, 2)

    def insert(self, repeat: Repeat, graph: Graph) -> Copies:
        traced = _traced_vertices(self.tables, repeat, graph)
        _check_alike(self.tables.problem, traced)
        model, following = traced[MODEL], traced[MODEL + 1]
        width, count = len(model), repeat.missing
        copies = len(self.vertices) + np.arange(count * width).reshape(count, width)
        self.vertices = np.concatenate([self.vertices, np.tile(self.vertices[model], count)])
        self._join(model, following, traced[MODEL - 1], copies)
        return Copies(repeat, traced, copies)

    def _join(self, model: Ints, following: Ints, before: Ints, copies: Ints) -> None:
        """Edges inside the copies, between them, and to whatever all periods share."""
        if not len(copies):
            return
        place = np.full(len(self.vertices), -1)  # position within the model period
        place[model] = np.arange(len(model))
        after = np.full(len(self.vertices), -1)  # position within the next period
        after[following] = np.arange(len(following))
        previous = np.zeros(len(self.vertices), dtype=bool)
        previous[before] = True
        inside, beyond = place[self.ends] >= 0, after[self.ends] >= 0
        bridge = inside.any(axis=1) & beyond.any(axis=1)
        own = inside.any(axis=1) & ~bridge & ~previous[self.ends].any(axis=1)
        # Copy by copy, as the search expects a run: the edges inside, then those to the one before.
        inner, crossing = self.ends[own], self.ends[bridge]
        here, there = np.vstack([model[None], copies]), np.vstack([copies, following[None]])
        within = np.where(inside[own], copies[:, place[inner]], inner)
        across = np.where(inside[bridge], here[:, place[crossing]], there[:, after[crossing]])
        each = np.concatenate([within, across[:-1]], axis=1).reshape(-1, 2)
        self.ends = np.concatenate([self.ends[~bridge], each, across[-1]])
        copied = np.tile(np.concatenate([self.edges[own], self.edges[bridge]]), len(copies))
        self.edges = np.concatenate([self.edges[~bridge], copied, self.edges[bridge]])

    def problem(self) -> Problem:
        return self.tables.problem.spread(self.vertices, self.ends, self.edges)


def _traced_vertices(tables: Tables, repeat: Repeat, graph: Graph) -> Ints:
    """The vertices of each traced period, in the order of what they stand for in it."""
    writers, readers = graph.writers(), graph.readers()
    periods: list[dict[object, int]] = [{} for _ in range(repeat.traced)]
    for number, vertex in enumerate(tables.vertices):
        for op, position in _places(vertex, writers, readers):
            period = repeat.period_of(op)
            if period is None:
                break
            key = (vertex.what, op - repeat.ops(period).start, position)
            periods[period][key] = number
    keys = sorted(periods[0], key=str)
    if any(period.keys() != periods[0].keys() for period in periods):
        raise AssertionError("The periods of a run were checked to be alike.")
    return np.array([[period[key] for key in keys] for period in periods], dtype=np.int64)


def _places(
    vertex: Vertex, writers: dict[int, Place], readers: dict[int, list[Place]]
) -> list[Place]:
    """The operator that a decision belongs to; none where several share it."""
    if vertex.what == "op":
        return [(vertex.index, 0)]
    if vertex.what == "tensor":
        return [writers[vertex.index]]
    return readers[vertex.index][:1] if len(readers[vertex.index]) == 1 else []


def _check_alike(problem: Problem, traced: Ints) -> None:
    """The traced periods must have the very same tables."""
    for column in traced.T.tolist():
        first = problem.costs[column[0]]
        if any(problem.costs[v] is not first for v in column[1:]):
            raise AssertionError(f"Vertices {column} of a run have different tables.")
