"""The best over all meshes, within a limit: every candidate against what the search finds alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from shardfold.cluster import Cluster, parse
from shardfold.costs import OPTIMIZERS, Pricing, Roofline, pricing_named
from shardfold.costs.steps import Compute, Values
from shardfold.errors import InfeasibleError, InputError
from shardfold.graph import Graph
from shardfold.planner import case
from shardfold.planner.case import RESERVE, Cases, Patience, ResolvedRequest
from shardfold.planner.mesh_search import search_meshes
from shardfold.planner.select import Selection
from shardfold.search import Solution, solve
from virtual.choosing import Desk
from virtual.sketch import Sketch

MESHES = ("8", "2x4", "2x2x2")


def mlp() -> Graph:
    sketch = Sketch()
    x = sketch.linear(sketch.input(64, 256), sketch.parameter(512, 256))
    y = sketch.linear(sketch.relu(x), sketch.parameter(256, 512))
    return sketch.graph(sketch.sum(sketch.relu(y)))


def search(limit_bytes: float | None = None, pricing: Pricing | None = None) -> Selection:
    graph = mlp()
    meshes = [Desk.of(graph, "8xa100", mesh).tables.mesh for mesh in MESHES]
    pricing, optimizer = pricing or pricing_named("roofline"), OPTIMIZERS["adamw"]
    request = ResolvedRequest(parse("8xa100"), meshes, pricing, optimizer, limit_bytes)
    return search_meshes(Cases(graph, request), request, lambda done, total: None)


class Sent(Roofline):
    """Local work is free."""

    def compute_seconds(self, step: Compute) -> Values:
        return np.zeros(len(step.flops))


def test_prices_that_leave_nothing_to_choose_by_are_refused() -> None:
    with pytest.raises(InputError, match=r"trains in no time.*has to price local work"):
        search(pricing=Pricing(Sent))


def problems() -> dict[str, object]:
    return {m: Desk.of(mlp(), "8xa100", m, "adamw").tables.problem for m in MESHES}


def test_long_searches_share_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    given: list[float] = []
    patience, found = Patience(), search().winner.solution
    monkeypatch.setattr(case, "process_time", lambda: now)

    def lasting(taken: float) -> Callable[[float], Solution]:
        def run(seconds: float) -> Solution:
            nonlocal now
            given.append(seconds)
            now += taken
            return found

        return run

    for taken in (40.0, 9.0, 9.0, 55.0, 12.0):
        assert patience.spend(lasting(taken)) is found
    assert given == [60.0, 30.0, 30.0, 30.0, 10.0]


def test_the_winner_is_the_cheapest_mesh() -> None:
    found = search()
    alone = {mesh: solve(problem).cost for mesh, problem in problems().items()}
    assert {str(c.case.mesh): c.solution.cost for c in found.searched} == pytest.approx(alone)
    assert found.winner.solution.cost == pytest.approx(min(alone.values()))
    assert found.is_optimal


def test_the_limit_is_the_devices_memory_less_a_reserve() -> None:
    cluster: Cluster = parse("8xa100")
    assert search().limit_bytes == (1 - RESERVE) * cluster.device.memory_bytes


def test_a_limit_binds_every_mesh() -> None:
    free = search()
    limit = 0.7 * (free.winner.solution.bytes or 0.0)
    found = search(limit + parse("8xa100").device.workspace_bytes)
    assert (found.winner.solution.bytes or 0.0) <= limit
    within = [solve(p, memory_limit=limit) for p in problems().values()]
    assert found.winner.solution.cost == pytest.approx(min(s.cost for s in within))


def test_a_limit_that_nothing_meets_is_an_error_only_where_it_was_asked_for() -> None:
    with pytest.raises(InfeasibleError) as caught:
        search(10.0)
    assert caught.value.limit_bytes == 10.0
    assert caught.value.needed_bytes > 10.0
    assert "Try more devices" in str(caught.value)
