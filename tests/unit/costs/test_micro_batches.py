"""What several passes cost: work in each, the update and what is held back once."""

import random

import numpy as np
import pytest

from shardfold import zoo
from shardfold.capture import capture
from shardfold.cluster import mesh_from_text, parse
from shardfold.costs import optimizer_named, pricing_named, tabulate
from shardfold.costs.steps import Collective, defer, is_deferred, times
from shardfold.operators import rules_of
from shardfold.sharding import find_subdims
from shardfold.simulate import simulate
from shardfold.simulate.decoded import DecodedChoice
from shardfold.simulate.tasks import Scheduler
from shardfold.strategies.baselines import batch_factors, fully_sharded, replicated

CLUSTER = parse("2x2xa100")
MESH = mesh_from_text("2x2", CLUSTER)
MODEL = pricing_named("roofline").model(CLUSTER, MESH)
ADAMW = optimizer_named("adamw")


@pytest.fixture(scope="module", params=["gpt2-tiny", "rnnlm-tiny"])
def captured(request):
    graph = capture(*zoo.build(request.param))
    return graph, find_subdims(graph, rules_of(graph))


def decoded(captured, passes, choose):
    tables = tabulate(*captured, MESH, MODEL, ADAMW, micro_batches=passes)
    return DecodedChoice(*captured, tables, choose(tables), MODEL, ADAMW)


def anything(seed):
    def choose(tables):
        rng = random.Random(seed)
        return tuple(rng.randrange(len(costs)) for costs in tables.problem.costs)

    return choose


def split(at):
    """Seconds of the steps of one pass, by when they are done."""
    found = {"every": 0.0, "later": 0.0, "last": 0.0}
    for steps in at.steps.values():
        for step in steps:
            found["last" if step.phase == "update" else step.turn] += at.seconds(step)
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("passes", [2, 5])
def test_tables_price_every_step_as_often_as_it_is_done(captured, seed, passes):
    at = decoded(captured, passes, anything(seed))
    found = split(at)
    total = passes * found["every"] + (passes - 1) * found["later"] + found["last"]
    assert at.tables.problem.total(at.choice) == pytest.approx(total, rel=1e-9)
    assert sum(at.totals().values()) == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_the_simulated_step_does_the_same(captured, seed):
    at = decoded(captured, 3, anything(seed))
    found = simulate(Scheduler(*captured, CLUSTER).alone(at))
    both = found.compute_seconds + found.communication_seconds
    assert both == pytest.approx(at.tables.problem.total(at.choice), rel=1e-9)


def sharded_once(at):
    """The parameters that are kept in parts over some axes, and whole over others."""
    chosen = zip(at.tables.vertices, at.choice, strict=True)
    stored = [(v.index, v.storage.layouts[k]) for v, k in chosen if v.storage is not None]
    names = at.graph.tensors
    return {names[t].name: t for t, row in stored if (row >= 0).any() and (row < 0).any()}


def test_data_parallelism_reduces_once_and_sharded_gradients_every_time(captured):
    batch = batch_factors(*captured)
    plain = decoded(captured, 4, lambda tables: replicated(tables, batch))
    sharded = decoded(captured, 4, lambda tables: fully_sharded(tables, batch))
    once = set(sharded_once(sharded).values())
    reduced, scattered = (
        [
            (times(step, 4), step.kind)
            for number, edge in enumerate(at.tables.edges)
            if edge.regathers is not None and at.tables.vertices[edge.source].index not in once
            for step in at.moves(number)[1]
        ]
        for at in (plain, sharded)
    )
    assert reduced
    assert set(reduced) == {(1, "all_reduce")}
    assert (4, "reduce_scatter") in scattered
    assert (4, "all_reduce") not in scattered
    # A packed bias is the one thing that DTensor cannot keep in parts over both axes.
    left_out = {name for name in sharded_once(sharded) if not name.endswith("c_attn.bias")}
    assert left_out == set()


def test_memory_is_that_of_one_pass_and_of_all_gradients(captured):
    at = decoded(captured, 4, lambda tables: replicated(tables, batch_factors(*captured)))
    schedule = Scheduler(*captured, CLUSTER).alone(at)
    parameters = sum(t.type.bytes for t in captured[0].tensors if t.role == "parameter")
    assert schedule.resident["gradients"] >= parameters
    assert schedule.passes == 4


def test_only_ways_of_nothing_but_sums_are_held():
    assert is_deferred(["all_reduce"])
    assert is_deferred(["all_reduce", "all_reduce"])
    assert not is_deferred([])
    assert not is_deferred(["slice", "all_reduce"])
    assert not is_deferred(["reduce_scatter"])


def test_rows_are_held_one_by_one():
    from shardfold.costs.steps import Steps

    def step(kind, *rows):
        return Collective("backward", kind, (0,), np.array(rows), np.ones(len(rows)))

    steps = defer(Steps(3, (step("all_reduce", 0, 1), step("reduce_scatter", 1, 2))))
    turns = [[(s.kind, s.turn) for s in steps.case(row)] for row in range(3)]
    assert turns == [
        [("all_reduce", "last")],
        [("all_reduce", "every"), ("reduce_scatter", "every")],
        [("reduce_scatter", "every")],
    ]
