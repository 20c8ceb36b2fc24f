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

from shardfold.costs.unroll import Copies, Unfolded
from shardfold.graph.repeats import MODEL
from shardfold.simulate.decoded import Assembly

Ints = NDArray[np.int64]
T = TypeVar("T")


@dataclass(frozen=True)
class Whole:
    """The solved problem of a whole model; `assembly` describes the graph's own vertices."""

    assembly: Assembly
    unfolded: Unfolded
    choice: Ints  # of every vertex of the unfolded problem

    @cached_property
    def runs(self) -> list[RunSteps]:
        """The runs, with who describes each of their periods."""
        return [RunSteps(self.assembly, run, run.rows(self.choice)) for run in self.unfolded.runs]

    @cached_property
    def outside(self) -> list[int]:
        """The vertices that are in no run."""
        in_runs = {v for run in self.runs for v in run.copies.traced.reshape(-1).tolist()}
        return [v for v in range(len(self.assembly.tabulated.vertices)) if v not in in_runs]

    def totals(self) -> dict[str, float]:
        """Seconds of local work, of communication and of the update."""
        totals = {"compute": 0.0, "communication": 0.0, "update": 0.0}
        for assembly, vertices, times in self.weighted():
            for kind, seconds in assembly.totals(vertices).items():
                totals[kind] += times * seconds
        return totals

    def weighted(self) -> Iterator[tuple[Assembly, Sequence[int], int]]:
        """Who describes which vertices, and how many times they stand in the model."""
        yield self.assembly, self.outside, 1
        for run in self.runs:
            periods = [run.period(order) for order in range(run.repeat.count)]
            who = {id(assembly): assembly for assembly, _ in periods}
            counts = Counter((id(assembly), period) for assembly, period in periods)
            for (key, period), times in counts.items():
                yield who[key], run.copies.traced[period].tolist(), times


Make = Callable[["RunSteps", Assembly, int, Sequence[str]], T]


class RunSteps:
    """One run: which assembly describes which of its periods."""

    def __init__(self, assembly: Assembly, copies: Copies, rows: Ints) -> None:
        self.assembly, self.copies, self.rows = assembly, copies, rows
        self.repeat = copies.repeat
        self.known: dict[object, Assembly] = {}

    def period(self, order: int) -> tuple[Assembly, int]:
        """The assembly, and the traced period in it, that describe the order-th period."""
        return self._periods[order]

    @cached_property
    def _periods(self) -> list[tuple[Assembly, int]]:
        last = self.repeat.count - 1
        between = [
            (self._with([MODEL - 1, MODEL, MODEL + 1], self.rows[order - 1 : order + 2]), MODEL)
            for order in range(1, last)
        ]
        closing = self._with([MODEL], self.rows[last - 1 : last]), self.repeat.traced - 1
        return [(self.assembly, 0), *between, closing]

    def each(self, make: Make[T]) -> Iterator[tuple[int, T]]:
        """What `make` gives for each period, made once for all that are described alike.

        It is given the run, the assembly, the traced period in it, and the paths of that period's
        blocks.
        """
        known: dict[tuple[int, int], T] = {}
        for order, (assembly, period) in enumerate(self._periods):
            key = (id(assembly), period)
            if key not in known:
                bearer = MODEL if period == MODEL else order
                known[key] = make(self, assembly, period, self.repeat.paths[bearer])
            yield order, known[key]

    def _with(self, periods: list[int], rows: Ints) -> Assembly:
        """The assembly with the choices of some traced periods set to the given ones."""
        key = (tuple(periods), rows.tobytes())
        if key not in self.known:
            choice = np.array(self.assembly.choice)
            choice[self.copies.traced[periods]] = rows
            self.known[key] = self.assembly.choosing(tuple(choice.tolist()))
        return self.known[key]

    def vertices(self, who: Assembly, period: int, what: str) -> list[int]:
        """The vertices of one kind that belong to a traced period."""
        vertices = who.tabulated.vertices
        return [v for v in self.copies.traced[period].tolist() if vertices[v].what == what]
