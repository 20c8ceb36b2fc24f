"""A run in two parts is the same model: same fingerprint, same plan.

Recomputing some blocks: a border anywhere in the model, and floors that no step goes below.
"""

from __future__ import annotations

import pytest

from shardfold import zoo
from shardfold.capture import capture_short
from shardfold.cluster import parse
from shardfold.costs import OPTIMIZERS, Tables, pricing_named, tabulate
from shardfold.costs.activations import KEEP_ALL, Blocks, Regions, block_regions, in_model
from shardfold.costs.unroll import unroll
from shardfold.graph import Graph
from shardfold.graph.repeats import are_alike
from shardfold.operators import rules_of
from shardfold.planner.partial_recompute import block_places, divide_at, divided, leading_regions, more_seconds
from shardfold.planner.select import least_seconds
from shardfold.search import solve
from shardfold.sharding import Subdims, find_subdims


def graph_of(name: str, layers: int) -> Graph:
    module, args, kwargs = zoo.build(name, layers=layers)
    graph = capture_short(module, args, kwargs)
    assert graph.repeats
    return graph


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama3-8b-tiny", "t5-large-tiny"])
def test_the_model_stays_the_same(name: str) -> None:
    graph = graph_of(name, 14)
    for number, repeat in enumerate(graph.repeats):
        for first in range(1, repeat.count):
            found = divided(graph, number, first)
            parts = found.repeats[number : len(found.repeats) - len(graph.repeats) + number + 1]
            assert {r.count for r in parts} <= {first - 1, repeat.count - first}
            assert all(are_alike(found, each) for each in found.repeats)
            assert found.operator_count == graph.operator_count
            assert found.digest() == graph.digest()


def test_a_border_at_an_end_is_refused() -> None:
    graph = graph_of("gpt2-tiny", 14)
    for first in (0, graph.repeats[0].count):
        with pytest.raises(ValueError, match="cannot be divided"):
            divided(graph, 0, first)


LAYERS = 9


def atoms_of(graph: Graph) -> Subdims:
    return find_subdims(graph, rules_of(graph, pricing_named("roofline").rules))


def tables_of(graph: Graph, subdims: Subdims, regions: Regions) -> Tables:
    cluster = parse("2xh100")
    (mesh,) = cluster.meshes()
    model = pricing_named("roofline").model(cluster, mesh)
    return tabulate(graph, subdims, mesh, model, OPTIMIZERS["adamw"], regions)


@pytest.fixture(scope="module", params=["llama3-8b-tiny", "t5-large-tiny"])
def graph(request) -> Graph:
    found = capture_short(*zoo.build(request.param, layers=LAYERS))
    assert found.repeats
    return found


def test_a_border_may_be_before_any_block(graph) -> None:
    subdims = atoms_of(graph)
    keeping = tables_of(graph, subdims, KEEP_ALL)
    every = block_regions(graph, subdims)
    whole = tables_of(graph, subdims, every)
    blocks = in_model(every, graph)
    least = least_seconds(unroll(keeping, graph).problem)
    places = block_places(graph, Blocks(graph, subdims))
    for count in range(1, len(places)):
        parted, border = divide_at(graph, subdims, count)
        its_atoms = atoms_of(parted)
        regions = leading_regions(parted, its_atoms, border)
        assert in_model(regions, parted) == tuple(b for b in blocks if b[0] < border)
        problem = unroll(tables_of(parted, its_atoms, regions), parted).problem
        more = more_seconds(graph, keeping, whole, border)
        assert more > 0
        assert least + more <= solve(problem).cost * (1 + 1e-12)
