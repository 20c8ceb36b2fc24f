"""Recomputing some blocks: a border anywhere in the model, and floors that no step goes below."""

from __future__ import annotations

import pytest

from shardfold import zoo
from shardfold.capture import capture_short
from shardfold.cluster import parse
from shardfold.costs import OPTIMIZERS, Tabulated, pricing_named, tabulate
from shardfold.costs.recompute import KEEP_ALL, Regions, block_regions, in_model
from shardfold.costs.unfold import unfold
from shardfold.graph import Graph
from shardfold.plans.floors import least_seconds, more_seconds
from shardfold.plans.sparing import _leading, _parted
from shardfold.search import solve
from shardfold.spaces import Atoms, atomise, rules_of

LAYERS = 9


def atoms_of(graph: Graph) -> Atoms:
    return atomise(graph, rules_of(graph, pricing_named("roofline").rules))


def tables_of(graph: Graph, atoms: Atoms, regions: Regions) -> Tabulated:
    cluster = parse("2x2xh100")
    mesh = cluster.meshes()[0]
    model = pricing_named("roofline").model(cluster, mesh)
    return tabulate(graph, atoms, mesh, model, OPTIMIZERS["adamw"], regions)


@pytest.fixture(scope="module", params=["llama3-8b-tiny", "t5-large-tiny"])
def graph(request) -> Graph:
    found = capture_short(*zoo.build(request.param, layers=LAYERS))
    assert found.repeats
    return found


def test_a_border_may_be_before_any_block(graph) -> None:
    atoms = atoms_of(graph)
    keeping = tables_of(graph, atoms, KEEP_ALL)
    every = block_regions(graph, atoms)
    whole = tables_of(graph, atoms, every)
    blocks = in_model(every, graph).ranges
    least = least_seconds(unfold(keeping, graph).problem)
    for count in range(1, len(blocks)):
        parted, border = _parted(graph, atoms, count)
        its_atoms = atoms_of(parted)
        regions = _leading(parted, its_atoms, border)
        assert in_model(regions, parted).ranges == blocks[:count]
        problem = unfold(tables_of(parted, its_atoms, regions), parted).problem
        more = more_seconds(graph, keeping, whole, border)
        assert more > 0
        assert least + more <= solve(problem).cost * (1 + 1e-12)
