"""On random small graphs no strategy by hand beats the exact search, and each keeps its word."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draws import draws
from shardfold.graph import Graph
from shardfold.search import solve
from shardfold.sharding.names import batch_classes
from shardfold.strategies.baselines import STRATEGIES, Setting, Unfit, batch_factors, replicated
from shardfold.strategies.split_preferences import Way, choose_ways
from virtual.choosing import Desk
from virtual.drawing import graphs

MESHES = {"2": "2xa100", "4": "4xa100", "2x2": "2x2xh100", "2x2x2": "2x4xh100"}


@given(graphs(), st.sampled_from(list(MESHES)))
@draws(60)
def test_no_strategy_beats_the_exact_search(graph: Graph, mesh: str) -> None:
    desk = Desk.of(graph, MESHES[mesh], mesh, "adamw")
    problem = desk.tables.problem
    best = solve(problem).cost
    for strategy in STRATEGIES.values():
        choice = strategy(Setting(desk.graph, desk.subdims, desk.tables))
        if not isinstance(choice, Unfit):
            total = problem.total(choice)
            assert np.isfinite(total)
            assert best <= total * (1 + 1e-9)


@given(graphs(), st.sampled_from(list(MESHES)))
@draws(60)
def test_operators_split_what_they_were_told_and_nothing_else(graph: Graph, mesh: str) -> None:
    desk = Desk.of(graph, MESHES[mesh], mesh, "adamw")
    batch = batch_classes(graph, desk.subdims)
    axes = tuple(range(len(desk.tables.mesh.axes)))
    choice = choose_ways(desk.tables, desk.subdims, lambda op: (Way(axes, (batch,)),))
    for v, vertex in enumerate(desk.tables.vertices):
        if vertex.space is not None:
            identities = desk.subdims.factors[vertex.index]
            row = vertex.space.configs[choice[v]].tolist()
            assert all(f == -1 or identities[f] in batch for f in row)


@given(graphs(), st.sampled_from(["2", "4", "2x2"]))
@draws(60)
def test_by_batch_is_data_parallel(graph: Graph, mesh: str) -> None:
    """Two ways to the same strategy: fix and complete, or restrict and solve."""
    desk = Desk.of(graph, MESHES[mesh], mesh, "adamw")
    batch = batch_factors(graph, desk.subdims)
    classes = batch_classes(graph, desk.subdims)
    axes = tuple(range(len(desk.tables.mesh.axes)))
    plain = replicated(desk.tables, batch)
    solved = choose_ways(desk.tables, desk.subdims, lambda op: (Way(axes, (classes,)),))
    total = desk.tables.problem.total
    assert total(solved) == pytest.approx(total(plain), rel=1e-9)
