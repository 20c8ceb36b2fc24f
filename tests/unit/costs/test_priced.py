"""What an operator takes is priced once, and is what it takes by itself."""

from __future__ import annotations

import numpy as np

from shardfold.cluster import mesh_from_text, parse
from shardfold.costs import OPTIMIZERS, tabulate
from shardfold.costs.activations import KEEP_ALL
from shardfold.costs.by_kernel import ByKernel
from shardfold.costs.model import split_seconds
from shardfold.costs.steps import Collective, Compute
from shardfold.costs.tables import EdgePrices
from shardfold.operators import rules_of
from shardfold.sharding import find_subdims
from shardfold.simulate.decoded import DecodedChoice
from virtual.sketch import Sketch

CLUSTER = parse("2x4xh100")
MESH = mesh_from_text("2x4", CLUSTER)
MODEL = ByKernel(CLUSTER, MESH)


def test_steps_of_a_configuration_are_those_of_the_operator_alone() -> None:
    sketch = Sketch()
    x = sketch.linear(sketch.input(16, 32), sketch.parameter(64, 32))
    x = sketch.linear(sketch.relu(x), sketch.parameter(32, 64))
    graph = sketch.graph(sketch.sum(x))
    subdims, optimizer = find_subdims(graph, rules_of(graph)), OPTIMIZERS["adamw"]
    tables = tabulate(graph, subdims, MESH, MODEL, optimizer)
    decoded = DecodedChoice(graph, subdims, tables, (), MODEL, optimizer)
    for vertex in tables.vertices[: len(graph.ops)]:
        assert vertex.space is not None
        assert vertex.priced is not None
        for choice in range(len(vertex.space.configs)):
            alone = decoded.own(vertex.index, vertex.space, choice)
            found = list(vertex.priced.case(choice))
            assert len(found) == len(alone)
            for (step, seconds), other in zip(found, alone, strict=True):
                assert step.phase == other.phase
                assert np.array_equal(step.bytes, other.bytes)
                if isinstance(other, Collective):
                    assert isinstance(step, Collective)
                    assert (step.kind, step.axes, seconds) == (other.kind, other.axes, None)
                else:
                    assert isinstance(step, Compute)
                    device, host = split_seconds(MODEL, other)
                    assert seconds == (float(device[0]), float(host[0]))


def test_cases_on_one_mesh_share_what_is_priced() -> None:
    sketch = Sketch()
    x = sketch.linear(sketch.input(16, 32), sketch.parameter(64, 32))
    graph = sketch.graph(sketch.sum(sketch.relu(x)))
    subdims = find_subdims(graph, rules_of(graph))
    prices = EdgePrices(MESH, MODEL)
    given = (graph, subdims, MESH, MODEL, OPTIMIZERS["sgd"], KEEP_ALL, prices)
    one, other = tabulate(*given), tabulate(*given)
    for a, b in zip(one.problem.edge_costs, other.problem.edge_costs, strict=True):
        assert a is b
    for mine, theirs in zip(one.vertices, other.vertices, strict=True):
        assert mine.priced is theirs.priced
        assert mine.storage is theirs.storage
