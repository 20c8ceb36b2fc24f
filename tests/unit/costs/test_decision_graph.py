"""An edge is described once: what tables price is what a choice's steps cost, and what runs."""

from __future__ import annotations

import numpy as np
import pytest

from shardfold.cluster import mesh_from_text, parse
from shardfold.costs import OPTIMIZERS, Roofline, price, tabulate
from shardfold.costs.activations import Region, Regions
from shardfold.costs.decision_graph import Sides, Vertex, shared_tensors, wire
from shardfold.costs.tables import Tables
from shardfold.graph import Graph
from shardfold.operators import rules_of
from shardfold.sharding import Space, find_subdims
from virtual.sketch import Sketch

B, M, V = 8, 16, 64
CLUSTER = parse("2x2xa100")
MESH = mesh_from_text("2x2", CLUSTER)
MODEL = Roofline(CLUSTER, MESH)


def tied() -> Graph:
    """A table that is looked up and multiplied by; a tensor that two operators read."""
    sketch = Sketch()
    tokens = sketch.input(B, dtype="int64")
    table = sketch.parameter(V, M, names=("embed.weight", "head.weight"))
    x = sketch.op("embedding", {"weight": table, "indices": tokens}, (B, M))
    y = sketch.add(sketch.relu(sketch.linear(x, sketch.parameter(M, M))), x)
    return sketch.graph(sketch.cross_entropy(sketch.linear(y, table), tokens))


GRAPH = tied()
SUBDIMS = find_subdims(GRAPH, rules_of(GRAPH))


def tables(passes: int = 1, again: range | None = None) -> Tables:
    found = () if again is None else (Region(tuple(again[:-1]), ((again[-1], 0),)),)
    regions = Regions(found)
    given = (GRAPH, SUBDIMS, MESH, MODEL, OPTIMIZERS["sgd"], regions)
    return tabulate(*given, micro_batches=passes)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("again", [None, range(1, 4)])
def test_a_table_has_the_price_of_the_steps_of_each_pair(passes: int, again: range | None) -> None:
    found, rng = tables(passes, again), np.random.default_rng(0)
    for number, edge in enumerate(found.edges):
        table = found.problem.edge_costs[number]
        for _ in range(20):
            pair = tuple(rng.integers(0, table.shape).tolist())
            one = edge.at(*pair)
            steps = [one.steps(leg, MESH.shape) for leg in one.legs(passes)]
            seconds = sum(price(each, MODEL, passes)[0] for each in steps)
            assert table[pair] == pytest.approx(seconds, rel=1e-12)


def test_every_operand_that_is_no_constant_has_an_edge_of_its_own() -> None:
    wiring = tables().wiring
    seen = []
    for op, numbers in enumerate(wiring.operand_edge):
        for operand, number in enumerate(numbers):
            tensor = GRAPH.ops[op].inputs[operand]
            assert (number is None) == (GRAPH.tensors[tensor].role == "input")
            if number is not None:
                edge = wiring.edges[number]
                assert (edge.tensor, edge.target) == (tensor, op)
                seen.append(number)
    assert sorted([*seen, *wiring.shared_edge.values()]) == list(range(len(wiring.edges)))
    assert sorted(wiring.shared_edge) == shared_tensors(GRAPH)


def test_the_last_gradient_of_a_tied_weight_takes_their_sum_along() -> None:
    edges = tables().edges
    sums = [edge for edge in edges if edge.reduces_sum]
    assert [GRAPH.ops[edge.target].kind for edge in sums] == ["aten.embedding"]  # read first
    assert [leg.what for leg in sums[0].legs()] == ["value", "gradient", "sum"]


def test_what_is_recomputed_is_moved_again_and_not_gathered_a_third_time() -> None:
    for edge in tables(again=range(1, 4)).edges:
        phases = [leg.phase for leg in edge.legs() if leg.what == "value"]
        assert phases[:1] == ["forward"]
        assert ("recompute" in phases) == edge.is_recomputed
        assert not (edge.is_recomputed and "backward" in phases)


def test_decisions_with_one_choice_each_are_wired_as_the_tables_are() -> None:
    """As the runner wires them."""
    full, rng = tables(), np.random.default_rng(1)
    choice = rng.integers(0, full.problem.sizes).tolist()
    vertices = []
    for vertex, at in zip(full.vertices, choice, strict=True):
        space = vertex.space and Space(vertex.space.rule, vertex.space.configs[at : at + 1])
        layouts = None if vertex.layouts is None else vertex.layouts[at : at + 1]
        storage = vertex.storage and vertex.storage.at(at)
        vertices.append(Vertex(vertex.what, vertex.index, space, layouts, storage))
    sides = Sides([vertex.space for vertex in vertices if vertex.space is not None])
    one = wire(GRAPH, SUBDIMS, vertices, sides)
    assert one.operand_edge == full.wiring.operand_edge
    for edge, among in zip(one.edges, full.edges, strict=True):
        legs = edge.legs()
        expected = among.at(choice[among.source], choice[among.target]).legs()
        kinds = [(leg.what, leg.phase) for leg in legs if (leg.source != leg.target).any()]
        wanted = [(leg.what, leg.phase) for leg in expected if (leg.source != leg.target).any()]
        assert kinds == wanted
