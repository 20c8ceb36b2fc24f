"""Makes a table shorter without losing what matters: rows and collectives that belong together.

Three joins, each of neighbours that a reader would read as one: places with the same operator
(query, key, value), small operators at one place (to, pow, mul), and reduce-scatters that go on
axis by axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import isclose, prod

from shardfold.plans.rows import Row, Traffic

UNNAMED = 0.05  # of a mixed row: kinds that go unnamed
PHASES = ("fwd", "again", "bwd", "upd")


def merged(rows: Iterable[Row]) -> list[Row]:
    """Join rows that differ only in their last name, at the first of them."""
    found: list[Row] = []
    for row in rows:
        at = next((i for i, other in enumerate(found) if _is_alike(other, row)), None)
        if at is None:
            found.append(row)
        else:
            found[at] = _joined(found[at], row)
    return found


def _joined(a: Row, b: Row) -> Row:
    traffic = tuple(
        replace(mine, seconds=mine.seconds + other.seconds)
        for mine, other in zip(a.traffic, b.traffic, strict=True)
    )
    return replace(
        a,
        places=(*a.places, *b.places),
        count=a.count + b.count,
        seconds=a.seconds + b.seconds,
        traffic=traffic,
    )


def _is_alike(a: Row, b: Row) -> bool:
    if not all(a.places) or not all(b.places):
        return False
    parents = {place.rpartition(".")[0] for place in (*a.places, *b.places)}
    facts = [(row.kinds, row.split, row.count / len(row.places)) for row in (a, b)]
    moved = [[(t.phase, t.kind, t.axes, t.bytes) for t in row.traffic] for row in (a, b)]
    return len(parents) == 1 and facts[0] == facts[1] and moved[0] == moved[1]


def gathered(rows: Iterable[Row], small: float) -> list[Row]:
    """Join small neighbours at the same places into one row of several kinds (to, pow, mul)."""
    found: list[Row] = []

    def key(row: Row) -> tuple[tuple[str, ...], str, bool]:
        return row.places, row.split, row.seconds < small and all(row.places)

    for (_, _, is_small), group in groupby(rows, key):
        members = list(group)
        is_many = is_small and len(members) > 1
        found.extend([_of_kinds(members)] if is_many else members)
    return found


def _of_kinds(rows: Sequence[Row]) -> Row:
    """One row for several kinds; those that cost next to nothing (views) go unnamed."""
    seconds = sum(row.seconds for row in rows)
    named = [row for row in rows if row.seconds >= UNNAMED * seconds] or rows[:1]
    return replace(
        rows[0],
        kinds=tuple(dict.fromkeys(kind for row in named for kind in row.kinds)),
        count=sum(row.count for row in rows),
        seconds=seconds,
        traffic=in_order(each for row in rows for each in row.traffic),
        is_mixed=True,
    )


def chained(found: Sequence[Traffic], mesh: Mapping[str, int]) -> list[Traffic]:
    """Join scatters that go on axis by axis, each with the part that the last one left."""
    joined: list[Traffic] = []
    for traffic in sorted(found, key=lambda each: -each.bytes):
        at = next((i for i, other in enumerate(joined) if _goes_on(other, traffic, mesh)), None)
        if at is None:
            joined.append(traffic)
            continue
        first = joined[at]
        axes = tuple(name for name in mesh if name in (*first.axes, *traffic.axes))
        joined[at] = replace(first, axes=axes, seconds=first.seconds + traffic.seconds)
    return joined


def _goes_on(first: Traffic, then: Traffic, mesh: Mapping[str, int]) -> bool:
    kinds = {(each.phase, each.kind) for each in (first, then)}
    left = first.bytes / prod(mesh[name] for name in first.axes)
    overlap = set(first.axes) & set(then.axes)
    return (
        kinds == {(first.phase, "scatter")}
        and not overlap
        and isclose(left, then.bytes, rel_tol=0.02)
    )


def in_order(found: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """Collectives by phase, the slowest first."""
    return tuple(sorted(found, key=lambda each: (PHASES.index(each.phase), -each.seconds)))
