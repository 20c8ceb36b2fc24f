"""Exact elimination along an order.

When variable v goes, the tables that mention it are replaced by one over its neighbours N(v):

    R_v[N(v)] = min over v of the sum of the tables that mention v

The sum of what remains after the last is the optimum. Its choice is read off backwards: given the
choices of N(v), the best v minimises the same sum, one slice of K entries; so no table of best
choices is stored. Work: the sum over v of K_v times the entries of R_v. A pattern of tables met
before is not computed again.

Example: a - b - c with two choices each; eliminating a leaves a table of 2 at b, b one of 2 at c.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardfold.search.factors import Factor, Factors, spread
from shardfold.search.interning import Array
from shardfold.search.minplus import minimise
from shardfold.search.progress import Progress, Watch, ignore

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
