"""FlexFlow's search as it was: random moves, each priced by simulating the step.

The moves of `shardfold.search.baselines` are priced by a few table entries. FlexFlow simulates the
step for every proposal, and so does this: the same rule of acceptance, from the best baseline,
with our simulator as their cost. They are given 100 times as long as the exact search takes on the
same tables, and go on to a stated time where that is longer. How many are made in the
hundredfold time, and with what, is measured. What all 250,000 would take is extrapolated from the
second half of the moves made, as steps that were met before are not described again, so that the
first take longest. Beside it stands all that `plan` does after tracing (tables and searches on
every mesh, simulations of candidates).
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from papers_search import DEVICES, MODELS, REPEATS, cluster_of
from shardfold import zoo
from shardfold.capture import capture
from shardfold.cluster import parse
from shardfold.costs import optimizer_named, pricing_named
from shardfold.graph import Graph
from shardfold.planner.case import Candidate, ResolvedRequest, Source, simulate
from shardfold.planner.planner import select_for
from shardfold.search import solve

BETA = 200.0  # as in `mcmc`: a step 0.5% longer is accepted one time in e
MOVES = 250_000
SECONDS = 8.0  # of moves in each case, at least
TIMES = 100  # as long as the exact search
LONGEST = 60.0  # seconds of moves in each case, whatever the exact search took


def rows() -> Iterator[dict[str, Any]]:
    """One row a model and number of devices."""
    for model in MODELS:
        module, args, kwargs = zoo.build(model)
        graph = capture(module, args, kwargs)
        for devices in DEVICES:
            yield {"model": model, "devices": devices, **_row(graph, devices)}


def _row(graph: Graph, devices: int) -> dict[str, Any]:
    cluster, updates = parse(cluster_of(devices, "1080ti")), optimizer_named("adamw")
    request = ResolvedRequest(cluster, cluster.meshes(), pricing_named("roofline"), updates)
    begin = time.perf_counter()
    selection = select_for(graph, request, lambda done, total: None)
    decided = time.perf_counter() - begin
    start = selection.best_baseline
    if start is None:  # none fits: the fastest of those
        baselines = [c for c in selection.simulated if c.source is Source.BASELINE]
        start = min(baselines, key=lambda c: c.seconds)
    problem, plan = start.case.tables.problem, selection.winner.seconds
    solutions = [solve(problem) for _ in range(REPEATS)]
    exact = min(solution.statistics.seconds for solution in solutions)
    granted = min(TIMES * exact, LONGEST)
    moved = _moved(start, max(granted, SECONDS))
    early = moved.within(granted)
    return {
        "start": start.label,
        "mesh": str(start.case.mesh),
        "vertices": len(problem),
        "moves": moved.count,
        "seconds": moved.seconds,
        "moves_per_second": moved.rate,
        "all_moves_seconds": MOVES / moved.rate,
        "granted_over_exact": granted / exact,
        "granted_moves": early.count,
        "granted_over_plan": early.best_seconds / plan,
        "start_over_plan": start.seconds / plan,
        "found_over_plan": moved.best_seconds / plan,
        "exact_over_plan": _simulated(start, solutions[0].choice) / plan,
        "exact_seconds": exact,
        "decide_seconds": decided,
    }


@dataclass(frozen=True)
class Moved:
    """When each move ended, the first at 0 being the start, and the shortest step met by then."""

    ends: Sequence[float]
    shortest: Sequence[float]

    @property
    def count(self) -> int:
        """Moves made."""
        return len(self.ends) - 1

    @property
    def seconds(self) -> float:
        """What they took."""
        return self.ends[-1]

    @property
    def rate(self) -> float:
        """Moves a second in the second half of the time.

        >>> Moved([0.0, 3.0, 4.0, 5.0, 6.0], [1.0] * 5).rate
        1.0
        """
        half = bisect_right(self.ends, self.ends[-1] / 2) - 1
        return (self.count - half) / (self.ends[-1] - self.ends[half])

    @property
    def best_seconds(self) -> float:
        """The shortest step of all."""
        return self.shortest[-1]

    def within(self, seconds: float) -> Moved:
        """The moves that had ended by then.

        >>> Moved([0.0, 3.0, 4.0, 5.0], [9.0, 9.0, 8.0, 7.0]).within(4.5)
        Moved(ends=[0.0, 3.0, 4.0], shortest=[9.0, 9.0, 8.0])
        """
        count = bisect_right(self.ends, seconds)
        return Moved(self.ends[:count], self.shortest[:count])


def _moved(start: Candidate, seconds: float) -> Moved:
    """Random moves from a strategy, each simulated, for as long as is said."""
    problem = start.case.tables.problem
    current = list(start.choice)
    step = _simulated(start, current)
    random, beta = np.random.default_rng(0), BETA / step
    begin, ends, shortest = time.perf_counter(), [0.0], [step]
    while ends[-1] < seconds and len(ends) <= MOVES:
        vertex = int(random.integers(len(problem)))
        before, current[vertex] = current[vertex], int(random.integers(problem.sizes[vertex]))
        new = _simulated(start, current)
        if new <= step or random.random() < math.exp(beta * (step - new)):
            step = new
        else:
            current[vertex] = before
        ends.append(time.perf_counter() - begin)
        shortest.append(min(shortest[-1], step))
    return Moved(ends, shortest)


def _simulated(start: Candidate, choice: Sequence[int]) -> float:
    solution = replace(start.solution, choice=tuple(choice))
    return simulate(replace(start, solution=solution, simulation=None)).seconds
