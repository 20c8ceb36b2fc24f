"""FlexFlow's search as it was: random moves, each judged by simulating the step.

The moves of `shardfold.search.mcmc` are priced by a few table entries. FlexFlow simulates the step
for every proposal, and so does this: the same rule of acceptance, from the best strategy by hand,
with our simulator as the judge, for a stated time. What 250,000 such moves would take is
extrapolated from the second half of that time, as steps that were met before are not described
again, so that the first moves take longest. Beside it stands what finds the plan: the exact search
on the same tables, and all that `plan` does after tracing (tables and searches on every mesh,
simulations of finalists).
"""

from __future__ import annotations

import math
import time
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from papers_search import DEVICES, MODELS, cluster_of
from shardfold import zoo
from shardfold.capture import capture
from shardfold.cluster import parse
from shardfold.costs import optimizer_named, pricing_named
from shardfold.graph import Graph
from shardfold.plans.decide import decide
from shardfold.plans.finalists import Finalist
from shardfold.plans.judge import Judge
from shardfold.plans.settle import Request
from shardfold.search import solve

BETA = 200.0  # as in `mcmc`: a step 0.5% longer is accepted one time in e
MOVES = 250_000
SECONDS = 8.0  # of moves in each case


def rows() -> Iterator[dict[str, Any]]:
    """One row a model and number of devices."""
    for model in MODELS:
        module, args, kwargs = zoo.build(model)
        graph = capture(module, args, kwargs)
        for devices in DEVICES:
            yield {"model": model, "devices": devices, **_row(graph, devices)}


def _row(graph: Graph, devices: int) -> dict[str, Any]:
    cluster, updates = parse(cluster_of(devices, "1080ti")), optimizer_named("adamw")
    request = Request(cluster, cluster.meshes(), pricing_named("roofline"), updates)
    begin = time.perf_counter()
    decision = decide(graph, request, lambda done, total: None)
    decided = time.perf_counter() - begin
    assert decision.verdict is not None
    start = decision.verdict.best_by_hand
    if start is None:  # none fits: the fastest of those
        hands = [j for j in decision.verdict.finalists if j.finalist.is_by_hand]
        start = min(hands, key=lambda j: j.rank)
    problem = start.finalist.candidate.tabulated.problem
    plan = decision.verdict.winner.rank
    moved = _moved(start.finalist, Judge(cluster, updates))
    exact = min(solve(problem).statistics.seconds for _ in range(3))
    return {
        "start": start.finalist.name,
        "mesh": str(start.finalist.candidate.mesh),
        "vertices": len(problem),
        "moves": moved.count,
        "seconds": moved.seconds,
        "moves_per_second": moved.rate,
        "all_moves_seconds": MOVES / moved.rate,
        "start_over_plan": start.rank / plan,
        "found_over_plan": moved.best_seconds / plan,
        "exact_seconds": exact,
        "decide_seconds": decided,
    }


@dataclass(frozen=True)
class Moved:
    """Moves made, the seconds that they took, how many a second at last, and the shortest step."""

    count: int
    seconds: float
    rate: float
    best_seconds: float


def _moved(start: Finalist, judge: Judge) -> Moved:
    """Random moves from a strategy, each simulated."""
    problem = start.candidate.tabulated.problem
    current = list(start.candidate.solution.choice)
    step = best = _simulated(judge, start, current)
    random, beta = np.random.default_rng(0), BETA / step
    begin, ends = time.perf_counter(), [0.0]
    while ends[-1] < SECONDS and len(ends) <= MOVES:
        vertex = int(random.integers(len(problem)))
        before, current[vertex] = current[vertex], int(random.integers(problem.sizes[vertex]))
        new = _simulated(judge, start, current)
        if new <= step or random.random() < math.exp(beta * (step - new)):
            step, best = new, min(best, new)
        else:
            current[vertex] = before
        ends.append(time.perf_counter() - begin)
    half = bisect(ends, ends[-1] / 2) - 1
    rate = (len(ends) - 1 - half) / (ends[-1] - ends[half])
    return Moved(len(ends) - 1, ends[-1], rate, best)


def _simulated(judge: Judge, start: Finalist, choice: Sequence[int]) -> float:
    solution = replace(start.candidate.solution, choice=tuple(choice))
    candidate = replace(start.candidate, solution=solution)
    return judge.judged([replace(start, candidate=candidate)])[0].rank
