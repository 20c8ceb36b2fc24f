"""TAPAS's claim with our planner: search time against depth, and plans against Megatron's.

For each depth: from the module to the plan, folded and not, and the exact search alone on the
problem of the whole model; plan quality is the sum of the best Megatron-style strategy over the
exact search's. An integer program on HiGHS gets the problems of smaller meshes, with one axis and
with two: with three it has millions of variables, and more than it takes in a minute.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import shardfold as sf
from shardfold import zoo
from shardfold.capture import capture
from shardfold.cluster import mesh_from_text, parse
from shardfold.costs import optimizer_named, pricing_named, tabulate
from shardfold.errors import ShardfoldError
from shardfold.graph import Graph
from shardfold.operators import rules_of
from shardfold.search import Problem, solve
from shardfold.search.ilp import ilp
from shardfold.sharding import find_subdims
from shardfold.strategies.baselines import STRATEGIES, Setting, Unfit

CLUSTER, MESH = "2x8xv100", "2x2x4"
PROGRAMS = (("8xv100", "8"), ("2x8xv100", "2x8"))  # what an integer program is tried on
ILP_SECONDS = 30.0
REPEATS = 7  # of the exact search, which takes milliseconds; the least counts


@dataclass(frozen=True)
class Series:
    """A model of the zoo that grows: in layers, or in the classes of its head."""

    label: str
    models: tuple[tuple[str, int | None], ...]  # a name, and the layers


SERIES = (
    Series("GPT", tuple(("gpt2", layers) for layers in (3, 6, 12, 24, 48, 96))),
    Series("T5", tuple(("t5-large", layers) for layers in (3, 6, 12, 24, 48))),
    Series("ResNet, 100,000 classes", (("resnet50-wide", None),)),
)


def rows() -> Iterator[dict[str, Any]]:
    """One row a series and depth."""
    for series in SERIES:
        for name, layers in series.models:
            yield {"series": series.label, "model": name, "layers": layers, **_row(name, layers)}


def _row(name: str, layers: int | None) -> dict[str, Any]:
    module, args, kwargs = zoo.build(name, layers=layers)
    plans, whole = {}, {}
    for way, fold in (("folded", True), ("unfolded", False)):
        begin = time.perf_counter()
        plans[way] = sf.plan(
            module, args, kwargs, cluster=CLUSTER, mesh=MESH, fold=fold, memory_limit=1e15
        )
        whole[way] = time.perf_counter() - begin
    graph = capture(module, args, kwargs)
    problem, quality = _problem(graph, CLUSTER, MESH)
    exact, seconds = _exact(problem)
    return {
        "operators": len(plans["unfolded"].operators),
        "plan_seconds": whole,
        "same_cost": abs(
            plans["folded"].estimate.additive_seconds / plans["unfolded"].estimate.additive_seconds
            - 1
        ),
        "exact_seconds": seconds,
        "megatron_over_exact": quality / exact if quality is not None else None,
        "ilp": [_integer_program(graph, cluster, mesh) for cluster, mesh in PROGRAMS],
    }


def _exact(problem: Problem) -> tuple[float, float]:
    """The optimum, and the least seconds of a few searches."""
    found = [solve(problem) for _ in range(REPEATS)]
    return found[0].cost, min(solution.statistics.seconds for solution in found)


def _problem(graph: Graph, cluster_name: str, mesh_name: str) -> tuple[Problem, float | None]:
    """The whole model's search problem, and the sum of the best Megatron-style strategy on it."""
    pricing, cluster = pricing_named("roofline"), parse(cluster_name)
    subdims = find_subdims(graph, rules_of(graph, pricing.rules))
    mesh = mesh_from_text(mesh_name, cluster)
    tables = tabulate(graph, subdims, mesh, pricing.model(cluster, mesh), optimizer_named("adamw"))
    setting = Setting(graph, subdims, tables)
    names = ("megatron", "megatron+sp", "mesh-tensorflow", "krizhevsky-2014")
    found = [STRATEGIES[name](setting) for name in names]
    steps = [tables.problem.total(c) for c in found if not isinstance(c, Unfit)]
    return tables.problem, min(steps, default=None)


def _integer_program(graph: Graph, cluster: str, mesh: str) -> dict[str, Any]:
    problem, _ = _problem(graph, cluster, mesh)
    cost, seconds = _exact(problem)
    variables = int(problem.sizes.sum()) + sum(table.size for table in problem.edge_costs)
    row = {"cluster": cluster, "mesh": mesh, "variables": variables, "exact_seconds": seconds}
    begin = time.perf_counter()
    try:
        answer = ilp(problem, seconds=ILP_SECONDS)
    except ShardfoldError as error:
        taken = time.perf_counter() - begin
        return {**row, "seconds": taken, "over_exact": None, "proven": False, "note": str(error)}
    return {
        **row,
        "seconds": time.perf_counter() - begin,
        "over_exact": problem.total(answer.choice.tolist()) / cost,
        "proven": answer.lower_bound is None,
    }
