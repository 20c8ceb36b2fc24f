"""On random small graphs the plan is the cheapest of all, whatever its operators are called."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from draws import draws
from shardfold.graph import Graph
from shardfold.plans.entries import operator_entries
from shardfold.search import Problem, solve
from virtual.choosing import Desk
from virtual.drawing import graphs, shuffled

MESHES = {"2": "2xa100", "4": "4xa100", "2x2": "4xa100", "8": "8xa100", "2x2x2": "8xa100"}
MOST = 300_000


def cheapest(problem: Problem) -> float:
    """Every combination at once: each table broadcast over the axes of its vertices."""
    sizes = problem.sizes.tolist()
    total = np.zeros(sizes)
    for v, table in enumerate(problem.costs):
        total += table.reshape([n if k == v else 1 for k, n in enumerate(sizes)])
    for (u, v), table in zip(problem.edges, problem.edge_costs, strict=True):
        ordered = table if u < v else table.T
        total += ordered.reshape([n if k in (u, v) else 1 for k, n in enumerate(sizes)])
    return float(total.min())


def is_small(problem: Problem) -> bool:
    return math.prod(problem.sizes.tolist()) <= MOST and len(problem) <= 32


def best(graph: Graph, mesh: str, cluster: str) -> float:
    return solve(Desk.of(graph, cluster, mesh, "adamw").tables.problem).cost


@given(graphs(), st.sampled_from(list(MESHES)))
@draws(175)
def test_the_plan_costs_what_brute_force_finds(graph: Graph, mesh: str) -> None:
    problem = Desk.of(graph, MESHES[mesh], mesh, "adamw").tables.problem
    assume(is_small(problem))
    found = solve(problem)
    assert found.is_optimal
    assert found.cost == pytest.approx(cheapest(problem), rel=1e-9)
    assert problem.total(found.choice) == pytest.approx(found.cost, rel=1e-9)


@given(graphs(max_ops=8), st.sampled_from(["2", "2x2"]), st.integers(0, 1000))
@draws(60)
def test_names_and_order_change_nothing(graph: Graph, mesh: str, seed: int) -> None:
    cluster = MESHES[mesh]
    again = best(shuffled(graph, seed), mesh, cluster)
    assert again == pytest.approx(best(graph, mesh, cluster), rel=1e-9)


@given(graphs(max_ops=4, sizes=(64, 1024, 8192)))
@draws(60)
def test_a_finer_mesh_never_costs_more(graph: Graph) -> None:
    coarse, middle, fine = (best(graph, mesh, "8xa100") for mesh in ("8", "2x4", "2x2x2"))
    assert middle <= coarse * (1 + 1e-9)
    assert fine <= middle * (1 + 1e-9)


@given(graphs(max_ops=5), st.data())
@draws(100)
def test_fewer_choices_never_cost_less(graph: Graph, data: st.DataObject) -> None:
    problem = Desk.of(graph, "4xa100", "2x2").tables.problem
    whole = solve(problem).cost
    v = data.draw(st.integers(0, len(problem) - 1))
    size = int(problem.sizes[v])
    kept = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1)))
    costs = list(problem.costs)
    costs[v] = costs[v][kept]
    tables = [
        table[kept] if a == v else table[:, kept] if b == v else table
        for (a, b), table in zip(problem.edges, problem.edge_costs, strict=True)
    ]
    fewer = replace(
        problem, costs=tuple(costs), edge_costs=tuple(tables), bytes=None, edge_bytes=None
    )
    assert solve(fewer).cost >= whole * (1 - 1e-9)


@given(graphs(max_ops=6), st.sampled_from(["2", "2x2", "2x2x2"]), st.integers(0, 1000))
@draws(60)
def test_any_choice_costs_the_sum_of_its_steps(graph: Graph, mesh: str, seed: int) -> None:
    """The tables are shared and priced in columns; the steps are made and priced one by one."""
    desk = Desk.of(graph, MESHES[mesh], mesh, "adamw")
    problem = desk.tables.problem
    rng = np.random.default_rng(seed)
    solution = solve(problem).choice
    for choice in (solution, *(tuple(rng.integers(0, problem.sizes)) for _ in range(4))):
        decoded = desk.decoded(tuple(int(c) for c in choice))
        total = problem.total(choice)
        assert math.fsum(decoded.totals().values()) == pytest.approx(total, rel=1e-9)
        each = [entry.seconds for entry in operator_entries(decoded)]
        assert math.fsum(each) == pytest.approx(total, rel=1e-9)


def test_drawn_graphs_have_shared_tensors_tied_weights_and_views() -> None:
    """What the properties are about does occur."""
    seen = {"shared": 0, "tied": 0, "view": 0, "add": 0}

    @given(graphs(max_ops=6))
    @settings(max_examples=100, derandomize=True)
    def look(graph: Graph) -> None:
        readers = graph.readers()
        roles = {t: graph.tensors[t].role for t, found in readers.items() if len(found) > 1}
        seen["shared"] += "activation" in roles.values()
        seen["tied"] += "parameter" in roles.values()
        seen["view"] += any(op.kind == "aten.view" for op in graph.ops)
        seen["add"] += any(op.kind == "aten.add" for op in graph.ops)

    look()
    assert min(seen.values()) >= 10, seen
