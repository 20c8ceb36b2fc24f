"""The steps of every layer of a model of which the graph holds only a few periods.

What a period's operators cost depends on its own choices and on those of the periods before and
after it. So each distinct triple of choices is described once, at the model period of the graph
with its neighbours set to match.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shardfold.costs.unroll import Copies, UnrolledProblem
from shardfold.graph.repeats import MODEL
from shardfold.simulate.decoded import DecodedChoice

Ints = NDArray[np.int64]
T = TypeVar("T")


@dataclass(frozen=True)
class UnrolledChoice:
    """A choice for every layer of a model; `decoded` describes the graph's own vertices."""

    decoded: DecodedChoice
    unrolled: UnrolledProblem
    choice: Ints  # of every vertex of the unrolled problem

    @cached_property
    def runs(self) -> list[RunSteps]:
        """The runs, with who describes each of their periods."""
        return [RunSteps(self.decoded, run, run.rows(self.choice)) for run in self.unrolled.runs]

    @cached_property
    def outside(self) -> list[int]:
        """The vertices that are in no run."""
        in_runs = {v for run in self.runs for v in run.copies.traced.reshape(-1).tolist()}
        return [v for v in range(len(self.decoded.tables.vertices)) if v not in in_runs]

    def totals(self) -> dict[str, float]:
        """Seconds of local work, of communication and of the update."""
        totals = {"compute": 0.0, "communication": 0.0, "update": 0.0}
        for decoded, vertices, times in self.weighted():
            for kind, seconds in decoded.totals(vertices).items():
                totals[kind] += times * seconds
        return totals

    def weighted(self) -> Iterator[tuple[DecodedChoice, Sequence[int], int]]:
        """Who describes which vertices, and how many times they stand in the model."""
        yield self.decoded, self.outside, 1
        for run in self.runs:
            periods = [run.period(order) for order in range(run.repeat.count)]
            who = {id(decoded): decoded for decoded, _ in periods}
            counts = Counter((id(decoded), period) for decoded, period in periods)
            for (key, period), times in counts.items():
                yield who[key], run.copies.traced[period].tolist(), times


Make = Callable[["RunSteps", DecodedChoice, int, Sequence[str]], T]


class RunSteps:
    """One run: which decoded choice describes which of its periods."""

    def __init__(self, decoded: DecodedChoice, copies: Copies, rows: Ints) -> None:
        self.decoded, self.copies, self.rows = decoded, copies, rows
        self.repeat = copies.repeat
        self.known: dict[object, DecodedChoice] = {}

    def period(self, order: int) -> tuple[DecodedChoice, int]:
        """The decoded choice, and the traced period in it, that describe the order-th period."""
        return self._periods[order]

    @cached_property
    def _periods(self) -> list[tuple[DecodedChoice, int]]:
        last = self.repeat.count - 1
        between = [
            (self._with([MODEL - 1, MODEL, MODEL + 1], self.rows[order - 1 : order + 2]), MODEL)
            for order in range(1, last)
        ]
        closing = self._with([MODEL], self.rows[last - 1 : last]), self.repeat.traced - 1
        return [(self.decoded, 0), *between, closing]

    def each(self, make: Make[T]) -> Iterator[tuple[int, T]]:
        """What `make` gives for each period, made once for all that are described alike.

        It is given the run, the decoded choice, the traced period in it, and the paths of that
        period's blocks.
        """
        known: dict[tuple[int, int], T] = {}
        for order, (decoded, period) in enumerate(self._periods):
            key = (id(decoded), period)
            if key not in known:
                bearer = MODEL if period == MODEL else order
                known[key] = make(self, decoded, period, self.repeat.paths[bearer])
            yield order, known[key]

    def _with(self, periods: list[int], rows: Ints) -> DecodedChoice:
        """The same with the choices of some traced periods set to the given ones."""
        key = (tuple(periods), rows.tobytes())
        if key not in self.known:
            choice = np.array(self.decoded.choice)
            choice[self.copies.traced[periods]] = rows
            self.known[key] = self.decoded.choosing(tuple(choice.tolist()))
        return self.known[key]

    def vertices(self, who: DecodedChoice, period: int, what: str) -> list[int]:
        """The vertices of one kind that belong to a traced period."""
        vertices = who.tables.vertices
        return [v for v in self.copies.traced[period].tolist() if vertices[v].what == what]
