"""A problem as one vector per vertex and one matrix per pair: the form that bounds work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardfold.search.factors import Factor, Factors
from shardfold.search.kinds import Array, Ints, Mask


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
