"""Exact elimination: tables as factors, an order of the variables, and one after another.

`Factors` are tables over any number of variables, for elimination in any order; `Pairwise` is one
vector per vertex and one matrix per pair, the form that bounds work on.

An order says which vertex goes next, and what that will cost before it is run. Every rule looks at
the vertices that a vertex shares a table with at the moment it would go:

- `generate-seq` (PaSE): the fewest of them;
- `min-degree`: the fewest entries in the table that it would leave behind;
- `min-fill`: the fewest pairs of them that do not know each other yet;
- `breadth-first`: the graph's own order from its first vertex, for comparison.

Each step joins the neighbours with each other. A rule costs O(n d^2 log n) for degree d.

When variable v goes, the tables that mention it are replaced by one over its neighbours N(v):

    R_v[N(v)] = min over v of the sum of the tables that mention v

The sum of what remains after the last is the optimum. Its choice is read off backwards: given the
choices of N(v), the best v minimises the same sum, one slice of K entries; so no table of best
choices is stored. Work: the sum over v of K_v times the entries of R_v. A pattern of tables met
before is not computed again.

Example: a - b - c with two choices each; eliminating a leaves a table of 2 at b, b one of 2 at c.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardfold.errors import InputError, nearest
from shardfold.search.interning import Array, Ints, Mask
from shardfold.search.minplus import minimise
from shardfold.search.problem import Problem
from shardfold.search.solution import Progress, Watch, ignore


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
        """Only the choices kept of each vertex; a matrix of which all are kept is not copied."""
        unary = tuple(vector[k] for vector, k in zip(self.unary, kept, strict=True))
        is_whole = [len(k) == len(vector) for vector, k in zip(self.unary, kept, strict=True)]
        tables = tuple(
            np.ascontiguousarray(
                table if is_whole[u] and is_whole[v] else table[np.ix_(kept[u], kept[v])]
            )
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


Near = list[set[int]]
Rank = Callable[[int, Near, Sequence[float]], float]


@dataclass(frozen=True, slots=True)
class Forecast:
    """What eliminating along an order needs: entries of the largest table, of all, and work."""

    order: tuple[int, ...]
    name: str
    largest: float
    stored: float
    work: float


def _degree(vertex: int, near: Near, logs: Sequence[float]) -> float:
    return len(near[vertex])


def _weight(vertex: int, near: Near, logs: Sequence[float]) -> float:
    return sum(logs[u] for u in near[vertex])


def _fill(vertex: int, near: Near, logs: Sequence[float]) -> float:
    mine = near[vertex]
    return sum(len(mine) - 1 - len(mine & near[u]) for u in mine)


_RANKS: dict[str, Rank] = {"generate-seq": _degree, "min-degree": _weight, "min-fill": _fill}

_NO_MATTER = 1e6
"""Joint entries that are added up sooner than another order is found."""

ORDERS = ("auto", *_RANKS, "breadth-first")


def forecast(factors: Factors, name: str) -> Forecast:
    """The order called `name`, or for "auto" the one with the least predicted work."""
    if name == "auto":
        first = forecast(factors, "min-degree")
        if first.work <= _NO_MATTER:
            return first
        tried = [first, forecast(factors, "min-fill"), forecast(factors, "generate-seq")]
        return min(tried, key=lambda f: (f.work, f.largest))
    if name == "breadth-first":
        return cost_of(factors, breadth_first(factors), name)
    if name not in _RANKS:
        raise InputError(f"Unknown order {name!r}. {nearest(name, ORDERS)}")
    return greedy_order(factors, _RANKS[name], name)


def greedy_order(factors: Factors, rank: Rank, name: str) -> Forecast:
    """Repeatedly the vertex of lowest rank, lowest number first among equals."""
    near = factors.around()
    logs = [math.log(size) for size in factors.sizes]
    heap = [(rank(v, near, logs), v) for v in range(len(near))]
    heapq.heapify(heap)
    current = {v: value for value, v in heap}
    order, left = list[int](), list[float]()
    while heap:
        value, vertex = heapq.heappop(heap)
        if current.get(vertex) != value:
            continue
        order.append(vertex)
        left.append(_weight(vertex, near, logs))
        del current[vertex]
        for u in _remove(vertex, near):
            new = rank(u, near, logs)
            if new != current[u]:
                current[u] = new
                heapq.heappush(heap, (new, u))
    return _forecast(factors, order, left, name)


def breadth_first(factors: Factors) -> tuple[int, ...]:
    """Vertices in order of distance from the first of each part."""
    near, seen, order = factors.around(), set[int](), list[int]()
    for root in range(len(near)):
        if root in seen:
            continue
        seen.add(root)
        queue = [root]
        for vertex in queue:
            fresh = sorted(near[vertex] - seen)
            seen.update(fresh)
            queue += fresh
        order += queue
    return tuple(order)


def cost_of(factors: Factors, order: Sequence[int], name: str) -> Forecast:
    """Run `order` on sizes only."""
    near = factors.around()
    logs = [math.log(size) for size in factors.sizes]
    left = []
    for vertex in order:
        left.append(_weight(vertex, near, logs))
        _remove(vertex, near)
    return _forecast(factors, order, left, name)


def _forecast(factors: Factors, order: Sequence[int], left: Sequence[float], name: str) -> Forecast:
    """The cost of an order, given the logarithm of the entries that each step leaves behind."""
    entries = [math.exp(min(log, 600.0)) for log in left]
    work = sum(e * factors.sizes[vertex] for e, vertex in zip(entries, order, strict=True))
    return Forecast(tuple(order), name, max(entries, default=0.0), sum(entries), work)


def _remove(vertex: int, near: Near) -> set[int]:
    """Take a vertex out and join its neighbours; they are returned."""
    mine = near[vertex]
    for u in mine:
        near[u] |= mine
        near[u] -= {u, vertex}
    return mine


Trail = list[tuple[int, list[Factor]]]


def eliminate(factors: Factors, order: Sequence[int], watch: Watch = ignore) -> tuple[Trail, float]:
    """Eliminate every variable; the tables that mentioned each when it went, and the optimum."""
    buckets: list[dict[int, Factor]] = [{} for _ in factors.sizes]
    for number, factor in enumerate(factors.factors):
        for variable in factor.scope:
            buckets[variable][number] = factor
    next_number = len(factors.factors)
    next_kind = max((f.kind for f in factors.factors), default=0) + 1
    known: dict[tuple[object, ...], tuple[int, Array]] = {}
    trail: Trail = []
    optimum = sum(float(factor.table) for factor in factors.factors if not factor.scope)
    for done, variable in enumerate(order):
        bucket = buckets[variable]
        mine = list(bucket.values())
        scope = tuple(sorted({u for f in mine for u in f.scope if u != variable}))
        key = _pattern(mine, scope, variable)
        if key not in known:
            known[key] = next_kind, join(mine, scope, variable, factors.sizes)
            next_kind += 1
        kind, table = known[key]
        trail.append((variable, mine))
        for number, factor in list(bucket.items()):
            for u in factor.scope:
                buckets[u].pop(number, None)
        if not scope:
            optimum += float(table)
        left = Factor(scope, table, kind)
        for u in scope:
            buckets[u][next_number] = left
        next_number += 1
        watch(Progress("exact", done + 1, len(order), table.size))
    return trail, optimum


def join(
    mine: Sequence[Factor], scope: tuple[int, ...], variable: int, sizes: Sequence[int]
) -> Array:
    """The table over `scope` that is left when `variable` goes."""
    whole = (*scope, variable)
    tables = [spread(factor, whole) for factor in mine] or [np.zeros((1,) * len(whole))]
    return minimise(tables, tuple(sizes[v] for v in whole))


def _pattern(mine: list[Factor], scope: tuple[int, ...], variable: int) -> tuple[object, ...]:
    """What the joined table depends on: table kinds, and which axis of which is which variable."""
    place = {u: i for i, u in enumerate(scope)}
    place[variable] = len(scope)
    return tuple(sorted((f.kind, tuple(place[u] for u in f.scope)) for f in mine))


def trace_back(trail: Trail, choice: dict[int, int]) -> None:
    """Choose each variable given those that went after it."""
    for variable, mine in reversed(trail):
        choice[variable] = best_given(variable, mine, choice)


def best_given(variable: int, mine: Sequence[Factor], choice: dict[int, int]) -> int:
    """The first cheapest choice of a variable, all others in its tables being chosen."""
    return int(np.argmin(slice_at(variable, mine, choice))) if mine else 0


def slice_at(variable: int, mine: Sequence[Factor], choice: dict[int, int]) -> Array:
    """The summed cost of each choice of a variable, all others in its tables being chosen."""
    rows = [
        factor.table[tuple(slice(None) if u == variable else choice[u] for u in factor.scope)]
        for factor in mine
    ]
    return np.asarray(sum(rows[1:], start=rows[0]))
