"""Where a model is cut into stages, and which of several choices each stage follows.

A stage takes the sum of its layers' times, and holds their parameters once and what they keep for
backward for every micro-batch in flight. The step that is made least is

    sum over stages of t + (micro-batches - 1) x the slowest t

    t[s, i, j]      of the choices that fit in memory, the fastest for layers i to j - 1 as stage s
    slowest         the least that any cut has: a table over stages and layers of max(before, t)
    least(T)        the least sum in which no stage takes more than T: a table of before + t

The least step has some t as its slowest. Each is tried, from the slowest of all cuts on, until
(micro-batches - 1) x T and the least sum of any cut are no shorter than the best. With one choice
all cuts have one sum, so the first is the best. Messages between stages count for nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
SAME = 1e-12  # of the longest stage: sums of equal layers differ in their last digits


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """Seconds and bytes of every layer under one choice, and the most a pass takes beside them."""

    seconds: Sequence[float]
    resident: Sequence[float]
    kept: Sequence[float]
    passing: float


@dataclass(frozen=True, slots=True)
class LayerCut:
    """How many layers each stage has, and the number of the choice, of its own, that it follows."""

    counts: list[int]
    choices: list[int]


def cut_layers(
    figures: Sequence[Sequence[LayerFigures]],
    flying: Sequence[int],
    room: float,
    micro_batches: int,
) -> LayerCut | None:
    """The least additive step; nothing where no cut fits in the room.

    Each stage has its choices, and so many micro-batches in flight.
    """
    stages = [_stage(own, number, room) for own, number in zip(figures, flying, strict=True)]
    tables = [times for times, _ in stages]
    counts, slowest = _walk(tables, np.maximum)
    if slowest == math.inf:
        return None
    if len({id(each) for own in figures for each in own}) > 1:
        counts = _least(tables, counts, slowest, micro_batches)
    ends = [0, *accumulate(counts)]
    chosen = [int(which[ends]) for (_, which), ends in zip(stages, pairwise(ends), strict=True)]
    return LayerCut(counts, chosen)


def _stage(
    figures: Sequence[LayerFigures], flying: int, room: float
) -> tuple[Table, NDArray[np.intp]]:
    """For layers i to j - 1 as a stage: the least time that fits, and whose it is."""
    every = []
    for each in figures:
        time, resident, kept = map(_sums, (each.seconds, each.resident, each.kept))
        allowed = np.tri(len(time), k=-1).T > 0  # i < j: no stage is empty
        fits = allowed & (resident + flying * kept + each.passing <= room)
        every.append(np.where(fits, time, math.inf))
    stacked = np.stack(every)
    return stacked.min(axis=0), stacked.argmin(axis=0)


def _sums(each: Sequence[float]) -> Table:
    """Of the layers from i to j - 1."""
    ends = np.array([0.0, *accumulate(each)])
    found: Table = ends[None, :] - ends[:, None]
    return found


def _least(
    tables: Sequence[Table], counts: list[int], slowest: float, micro_batches: int
) -> list[int]:
    """The cut with the least step, of all whose slowest stage takes `slowest` or more."""
    times = np.concatenate([table[np.isfinite(table)] for table in tables])
    unit = max(times.max(), SAME) * SAME
    _, free = _walk(tables, np.add)
    best = math.inf
    for rounded in np.unique(np.ceil(times[times >= slowest - unit] / unit)):
        time = float(rounded * unit)
        if free + (micro_batches - 1) * time >= best:
            break
        limited = [np.where(table <= time + unit, table, math.inf) for table in tables]
        cut, total = _walk(limited, np.add)
        if total + (micro_batches - 1) * time < best:
            counts, best = cut, total + (micro_batches - 1) * time
    return counts


def _walk(tables: Sequence[Table], join: np.ufunc) -> tuple[list[int], float]:
    """How many layers each stage has, so that what joins their times is least."""
    count = len(tables[0]) - 1
    least = np.full(count + 1, math.inf)
    least[0] = 0.0
    back = []
    for table in tables:
        joined = np.where(np.isinf(table), math.inf, join(least[:, None], table))
        back.append(joined.argmin(axis=0))
        least = joined.min(axis=0)
    if least[count] == math.inf:
        return [], math.inf
    ends = [count]
    for choice in reversed(back):
        ends.append(int(choice[ends[-1]]))
    return [b - a for a, b in pairwise(reversed(ends))], float(least[count])
