"""The bound on pipelines: no cut, number of stages or micro-batches, or schedule is below it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest

from shardfold.api import Planner
from shardfold.errors import InputError
from shardfold.pipeline import Pipeline, StageTimes, simulate
from shardfold.pipeline.cut import Layers
from shardfold.planner.options import Request
from shardfold.planner.pipeline_bound import PipelineBound, Work
from shardfold.planner.planner import select_for

from .test_staged import planner

CLUSTER = "2x2xa100"

Layer = tuple[float, float]  # seconds forward and backward


def pipelines(layers: int) -> Iterator[Pipeline]:
    """All that so few layers can be cut into."""
    for devices in range(2, layers + 1):
        for micro_batches in (1, 2, 4):
            for schedule in ("gpipe", "1f1b", "interleaved"):
                for chunks in range(2, layers // devices + 1) if schedule[0] == "i" else (1,):
                    try:
                        yield Pipeline(schedule, devices, micro_batches, chunks)
                    except InputError:
                        continue


def shortest(layers: list[Layer], pipeline: Pipeline) -> float:
    """The step of the best of all ways to cut."""
    steps = []
    for inner in combinations(range(1, len(layers)), pipeline.stages - 1):
        spans = pairwise((0, *inner, len(layers)))
        sums = [(sum(f for f, _ in layers[a:b]), sum(g for _, g in layers[a:b])) for a, b in spans]
        steps.append(simulate(pipeline, [StageTimes(*each) for each in sums]).step_seconds)
    return min(steps)


def test_no_pipeline_of_300_random_models_is_below_the_bound() -> None:
    rng = random.Random(0)
    shares = []
    for _ in range(300):
        count = rng.randint(2, 4)
        layers = [(rng.uniform(0.1, 2), rng.uniform(0.1, 4)) for _ in range(count)]
        whole = [sum(each) for each in layers]
        work = Work(sum(whole), min(whole))
        for pipeline in pipelines(count):
            least = work.least_step(pipeline.devices, pipeline.micro_batches, count)
            step = shortest(layers, pipeline)
            assert least <= step * (1 + 1e-9)
            shares.append(least / step)
    assert sum(shares) / len(shares) > 0.7  # it is of use


@pytest.fixture(scope="module")
def stack() -> Planner:
    return planner(layers=6)


def bound_of(stack: Planner, cost: str) -> PipelineBound:
    asked = stack._asked(Request(), CLUSTER, {"cost": cost})
    graph = stack._captured(asked, short=True).graph(1)
    selection = select_for(graph, asked.search, lambda done, total: None)
    return PipelineBound.of([c.case for c in selection.searched])


@pytest.mark.parametrize("cost", ["roofline", "kernels"])
def test_no_stated_pipeline_is_below_the_bound(stack: Planner, cost: str) -> None:
    bound = bound_of(stack, cost)
    for degrees, stages in (("pp=2 dp=2", 2), ("pp=2 fsdp=2", 2), ("pp=4", 4)):
        for count in (2, 8, 32):
            for schedule in ("1f1b", "gpipe"):
                text = f"{degrees} micro-batches={count} schedule={schedule}"
                found = stack.estimate(text, cluster=CLUSTER, cost=cost, beside_plan=False)
                assert bound.least_step(stages, count) <= found.step_seconds, text


def test_a_host_asks_for_every_micro_batch(stack: Planner) -> None:
    bound = bound_of(stack, "kernels")
    assert bound.host.model > bound.host.layer > 0
    assert bound.least_step(2, 32) > 1.9 * bound.least_step(2, 16)


def test_layers_add_up_to_the_model_however_it_is_traced() -> None:
    sums = []
    for fold in (True, False):
        found = planner(layers=6, fold=fold)
        graph = found._captured(found._asked(Request(), "4xa100", {}), short=fold).graph(1)
        layers = Layers.of(graph)
        before, inside, after = layers.sums([1.0] * len(graph.ops))
        assert before + sum(inside) + after == graph.operator_count
        sums.append((before, inside, after))
    assert sums[0] == sums[1]
