"""A problem as factors: tables over any number of variables, for elimination in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardfold.search.kinds import Array
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
