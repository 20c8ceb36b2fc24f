"""A problem as factors: tables over any number of variables, for elimination in any order.

A problem as one vector per vertex and one matrix per pair: the form that bounds work on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardfold.search.interning import Array, Ints, Mask
from shardfold.search.problem import Problem


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """A table whose axes are the variables of `scope`; equal `kind` means equal table."""

    scope: tuple[int, ...]
    table: Array
    kind: int

    @staticmethod
    def of(scope: tuple[int, ...], table: Array, kind: int) -> Factor:
        """A factor without the variables that have one choice only: they decide nothing.

        A problem of which most has been struck out would else need more axes than arrays have.
        """
        if 1 not in table.shape:
            return Factor(scope, table, kind)
        many = [axis for axis, length in enumerate(table.shape) if length > 1]
        shape = [table.shape[axis] for axis in many]
        return Factor(tuple(scope[axis] for axis in many), table.reshape(shape), kind)


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """Variables 0..len(sizes)-1 with their number of choices, and the tables to sum."""

    sizes: tuple[int, ...]
    factors: tuple[Factor, ...]

    def around(self) -> list[set[int]]:
        """The variables that share a table with each variable."""
        near: list[set[int]] = [set() for _ in self.sizes]
        for factor in self.factors:
            for variable in factor.scope:
                near[variable].update(factor.scope)
        for variable, others in enumerate(near):
            others.discard(variable)
        return near

    def total(self, choice: Sequence[int]) -> float:
        """The cost of one choice per variable."""
        return sum(float(f.table[tuple(choice[v] for v in f.scope)]) for f in self.factors)


def factors_of(problem: Problem) -> Factors:
    """Every vertex and every edge as a factor."""
    vertices = [
        Factor.of((v,), problem.vertex_kinds.tables[kind], kind)
        for v, kind in enumerate(problem.vertex_kinds.of.tolist())
    ]
    base = len(problem.vertex_kinds.tables)
    edges = [
        Factor.of((u, v), problem.edge_kinds.tables[kind], base + kind)
        for (u, v), kind in zip(problem.ends.tolist(), problem.edge_kinds.of.tolist(), strict=True)
    ]
    return Factors(tuple(problem.sizes.tolist()), (*vertices, *edges))


def spread(factor: Factor, scope: tuple[int, ...]) -> Array:
    """The table with its axes in the order of `scope`, of length 1 where it has none."""
    if factor.scope == scope:
        return factor.table
    if len(factor.scope) == 1:
        return factor.table.reshape([-1 if v == factor.scope[0] else 1 for v in scope])
    place = {variable: axis for axis, variable in enumerate(factor.scope)}
    axes = [place[v] for v in scope if v in place]
    shape = [factor.table.shape[place[v]] if v in place else 1 for v in scope]
    return np.asarray(factor.table.transpose(axes).reshape(shape))


@dataclass(frozen=True, slots=True, eq=False)
class Pairwise:
    """Vertex vectors, and matrices between pairs (u, v) with u < v, each pair once."""

    unary: tuple[Array, ...]
    pairs: tuple[tuple[int, int], ...]
    tables: tuple[Array, ...]

    @staticmethod
    def of(factors: Factors) -> Pairwise:
        """Add up factors of the same one or two variables."""
        unary = [np.zeros(size) for size in factors.sizes]
        tables: dict[tuple[int, int], Array] = {}
        for factor in factors.factors:
            if not factor.scope:
                unary[0] = unary[0] + factor.table
                continue
            if len(factor.scope) == 1:
                unary[factor.scope[0]] = unary[factor.scope[0]] + factor.table
                continue
            u, v = factor.scope
            pair, table = ((u, v), factor.table) if u < v else ((v, u), factor.table.T)
            tables[pair] = tables[pair] + table if pair in tables else table
        return Pairwise(tuple(unary), tuple(tables), tuple(tables.values()))

    def incident(self) -> list[list[tuple[int, int]]]:
        """Per vertex, the number of each pair it is in and the vertex at the other end."""
        near: list[list[tuple[int, int]]] = [[] for _ in self.unary]
        for number, (u, v) in enumerate(self.pairs):
            near[u].append((number, v))
            near[v].append((number, u))
        return near

    def seen_from(self, number: int, vertex: int) -> Array:
        """A pair's matrix with `vertex` along its rows."""
        table = self.tables[number]
        return table if self.pairs[number][0] == vertex else table.T

    def total(self, choice: Sequence[int]) -> float:
        """The cost of one choice per vertex."""
        cost = sum(float(vector[x]) for vector, x in zip(self.unary, choice, strict=True))
        for (u, v), table in zip(self.pairs, self.tables, strict=True):
            cost += float(table[choice[u], choice[v]])
        return cost

    def restricted(self, kept: Sequence[Ints]) -> Pairwise:
        """Only the choices kept of each vertex."""
        unary = tuple(vector[k] for vector, k in zip(self.unary, kept, strict=True))
        tables = tuple(
            np.ascontiguousarray(table[np.ix_(kept[u], kept[v])])
            for (u, v), table in zip(self.pairs, self.tables, strict=True)
        )
        return Pairwise(unary, self.pairs, tables)

    def condensed(self) -> Pairwise:
        """The same costs without pairs that have one choice at an end: they join the other end."""
        unary = list(self.unary)
        pairs, tables = list[tuple[int, int]](), list[Array]()
        for (u, v), table in zip(self.pairs, self.tables, strict=True):
            if len(unary[u]) == 1:
                unary[v] = unary[v] + table[0]
            elif len(unary[v]) == 1:
                unary[u] = unary[u] + table[:, 0]
            else:
                pairs.append((u, v))
                tables.append(table)
        return Pairwise(tuple(unary), tuple(pairs), tuple(tables))

    def factors(self) -> Factors:
        """The same problem as factors, for elimination."""
        vertices = [Factor((v,), vector, v) for v, vector in enumerate(self.unary)]
        edges = [
            Factor.of(pair, table, len(vertices) + number)
            for number, (pair, table) in enumerate(zip(self.pairs, self.tables, strict=True))
        ]
        return Factors(tuple(len(vector) for vector in self.unary), (*vertices, *edges))


def kept(masks: Sequence[Mask]) -> list[Ints]:
    """Masks as index lists."""
    return [np.flatnonzero(mask) for mask in masks]
