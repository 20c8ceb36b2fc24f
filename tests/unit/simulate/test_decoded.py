"""A plan from a short graph is the plan of the whole model."""

from __future__ import annotations

import math
from typing import Any

import pytest

import shardfold as sf
from shardfold import zoo


def planned(name: str, layers: int, cluster: str, **options: Any) -> sf.Plan:
    model, args, kwargs = zoo.build(name, layers=layers)
    # By kernels, the hosts of so small models would make all plans alike.
    return sf.plan(model, args, kwargs, cluster=cluster, cost="roofline", **options)


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("llama3-8b-tiny", "8xa100"),  # meshes of up to three axes
        ("t5-large-tiny", "2x2xh100"),  # two levels, two runs of blocks
        ("mixtral-8x7b-tiny", "4xa100"),  # experts
    ],
)
def test_short_and_full_give_the_same_plan(name: str, cluster: str) -> None:
    short, full = (planned(name, 9, cluster, fold=fold) for fold in (True, False))
    for field in (
        "additive_seconds",
        "step_seconds",
        "data_parallel_seconds",
        "fully_sharded_seconds",
        "peak_bytes",
    ):
        ours, theirs = getattr(short.estimate, field), getattr(full.estimate, field)
        assert ours == pytest.approx(theirs, rel=1e-9), field
    assert short.provenance.graph == full.provenance.graph
    assert short.provenance.parameters == full.provenance.parameters
    assert [o.module for o in short.operators] == [o.module for o in full.operators]
    assert [o.kind for o in short.operators] == [o.kind for o in full.operators]
    assert [p.names for p in short.parameters] == [p.names for p in full.parameters]
    assert len(short.tensors) == len(full.tensors)
    assert len({o.name for o in short.operators}) == len(short.operators)


def parts(plan: sf.Plan) -> tuple[float, float]:
    e = plan.estimate
    by_operator = math.fsum(o.seconds for o in plan.operators)
    return by_operator, e.compute_seconds + e.communication_seconds + e.update_seconds


def test_the_parts_add_up_where_layers_choose_alike() -> None:
    short = planned("llama3-8b-tiny", 12, "2x2xh100")
    for total in parts(short):
        assert total == pytest.approx(short.estimate.additive_seconds, rel=1e-9)


def test_the_parts_add_up_where_a_limit_makes_layers_differ() -> None:
    free = planned("gpt2-tiny", 12, "4xa100")
    limit = 0.9 * free.estimate.peak_bytes
    short = planned("gpt2-tiny", 12, "4xa100", memory_limit=limit)
    assert short.estimate.peak_bytes <= limit
    assert short.simulation is not None
    assert free.simulation is not None
    # Selecting among simulated steps is not exact, as the search for the least sum is.
    assert short.simulation.step_seconds >= 0.99 * free.simulation.step_seconds
    assert short.estimate.additive_seconds >= free.estimate.additive_lower_bound_seconds
    for total in parts(short):
        assert total == pytest.approx(short.estimate.additive_seconds, rel=1e-9)
