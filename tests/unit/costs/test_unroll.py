"""The problem of a whole model, from the tables of a few periods, is that of its full graph."""

from __future__ import annotations

import numpy as np
import pytest

from shardfold import zoo
from shardfold.capture import capture, capture_short
from shardfold.cluster import parse
from shardfold.costs import optimizer_named, pricing_named, tabulate
from shardfold.costs.unroll import unroll
from shardfold.graph import Graph
from shardfold.operators import rules_of
from shardfold.search import Problem, repeats, solve
from shardfold.search.repeats import find_run
from shardfold.sharding import find_subdims


def problem_of(graph: Graph, cluster: str = "2x2xh100") -> Problem:
    target = parse(cluster)
    mesh, pricing = target.meshes()[0], pricing_named("roofline")
    subdims = find_subdims(graph, rules_of(graph, pricing.rules))
    model = pricing.model(target, mesh)
    return unroll(tabulate(graph, subdims, mesh, model, optimizer_named("adamw")), graph).problem


def made_anew(problem: Problem) -> Problem:
    """The same problem from its plain parts, with everything compared and checked."""
    given = (problem.costs, problem.edges, problem.edge_costs, problem.bytes, problem.edge_bytes)
    return Problem(*given)


@pytest.mark.parametrize("name", ["llama3-8b-tiny", "t5-large-tiny"])
def test_short_and_full_graphs_give_equal_problems(name: str) -> None:
    model, args, kwargs = zoo.build(name, layers=10)
    short = problem_of(capture_short(model, args, kwargs))
    full = problem_of(capture(model, args, kwargs))
    assert (len(short), len(short.edges)) == (len(full), len(full.edges))
    assert sorted(short.sizes.tolist()) == sorted(full.sizes.tolist())
    assert solve(short).cost == pytest.approx(solve(full).cost, rel=1e-9)


def test_a_spread_problem_is_one_made_anew() -> None:
    model, args, kwargs = zoo.build("llama3-8b-tiny", layers=12)
    problem = problem_of(capture_short(model, args, kwargs))
    anew = made_anew(problem)
    rng = np.random.default_rng(0)
    for _ in range(5):
        choice = rng.integers(0, problem.sizes)
        assert problem.total(choice) == pytest.approx(anew.total(choice), rel=1e-12)
        assert problem.total_bytes(choice) == pytest.approx(anew.total_bytes(choice), rel=1e-12)
    for kinds in (problem.vertex_kinds, problem.edge_kinds):
        assert [kinds.of[position] for position in kinds.first] == list(range(len(kinds.tables)))


def test_a_deep_model_is_a_run_to_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_MIN_VERTICES", 2_000)
    model, args, kwargs = zoo.build("llama3-8b-tiny", layers=60)
    run = find_run(problem_of(capture_short(model, args, kwargs)))
    assert run is not None
    assert run.copies >= 50
