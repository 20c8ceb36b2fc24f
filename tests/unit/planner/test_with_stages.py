"""Whether a plan has stages: where they are asked for, worth it, or the only way to fit."""

from __future__ import annotations

import pytest

from shardfold.api import Planner
from shardfold.cluster import parse
from shardfold.errors import InfeasibleError, InputError
from shardfold.plans import Plan

from .test_staged import planner


def test_stages_are_asked_for_by_number_even_if_they_lose(stack: Planner) -> None:
    found = stack.plan(cluster="2x2xa100", pipeline=2, micro_batches=4)
    assert found.pipeline is not None
    assert found.pipeline.parts == 2
    free = stack.plan(cluster="2x2xa100", prefer="speed", micro_batches=4)
    off = stack.plan(cluster="2x2xa100", pipeline="off", prefer="speed", micro_batches=4)
    steps = (found.estimate.step_seconds, off.estimate.step_seconds)
    assert free.estimate.step_seconds <= min(steps)


def test_stages_are_taken_where_they_are_worth_it(
    stack: Planner, slow: str, piped: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = stack.plan(cluster=slow, pipeline="off", micro_batches=8)
    share = piped.estimate.step_seconds / off.estimate.step_seconds
    for worth, prefer, wins in (
        (1.15 * share, "simple", True),
        (0.99 * share, "simple", False),
        (0.99 * share, "speed", True),
    ):
        monkeypatch.setattr("shardfold.planner.with_stages.WORTH", worth)
        found = stack.plan(cluster=slow, prefer=prefer, micro_batches=8)
        assert (found.pipeline is not None) == wins


def test_where_the_host_decides_stages_are_not_looked_for(stack: Planner) -> None:
    asked = {"cluster": "4xh100", "cost": "kernels", "micro_batches": 4}
    hosted = stack.plan(**asked)
    assert hosted.pipeline is None
    least = hosted.estimate.pipeline_lower_bound_seconds
    assert least is not None
    assert least < 0.9 * hosted.estimate.step_seconds
    fast = stack.plan(prefer="speed", **asked)
    assert fast.pipeline is not None


@pytest.mark.parametrize("options", [{"mesh": "2x2"}, {"pins": {"head": "vocab/2"}}])
def test_what_stages_do_not_go_with_is_planned_without(
    stack: Planner, slow: str, options: dict[str, object]
) -> None:
    found = stack.plan(cluster=slow, micro_batches=8, **options)  # type: ignore[arg-type]
    assert found.pipeline is None
    assert found.estimate.pipeline_lower_bound_seconds is None


def test_a_limit_that_only_stages_meet_is_met(stack: Planner) -> None:
    plain = stack.plan(cluster="4xa100", pipeline="off", micro_batches=4, recompute="never")
    with_stages = stack.plan(cluster="4xa100", pipeline=4, micro_batches=4, recompute="never")
    assert with_stages.fits
    limit = with_stages.estimate.peak_bytes
    again = stack.plan(
        cluster="4xa100", pipeline=4, micro_batches=4, recompute="never", memory_limit=limit
    )
    assert again.estimate.peak_bytes <= limit
    with pytest.raises(InfeasibleError, match=r"Part \d of 4 is the fullest"):
        stack.plan(cluster="4xa100", pipeline=4, micro_batches=4, memory_limit=1000.0)
    assert plain.fits


def test_the_plan_beside_an_estimate_and_on_more_nodes_is_the_plan(
    stack: Planner, slow: str, piped: Plan
) -> None:
    assert piped.pipeline is not None
    beside = stack.estimate("dp=4 micro-batches=8", cluster=slow, micro_batches=8)
    (row,) = stack.scale([parse(slow)], [2], micro_batches=8).rows
    step, peak = piped.estimate.step_seconds, piped.estimate.peak_bytes
    assert (beside.plan_seconds, beside.plan_bytes) == (step, peak)
    assert (row.step_seconds, row.peak_bytes) == (step, peak)
    assert row.how.startswith(f"mesh {piped.pipeline.parts} of ")
    with pytest.raises(InputError, match="batch that is max is looked for without stages"):
        Planner(stack.model, stack.args, cluster=slow, pipeline=2).with_batch("max")


def test_a_pin_of_one_layer_holds_beside_an_estimate_and_on_more_nodes() -> None:
    """Of a long run of layers a short graph has the first and the last few."""
    cluster, pins = "2x2xa100", {"layers.5.up": "out/4"}
    stack = planner(layers=12)
    plan = stack.plan(cluster=cluster, pins=pins)
    assert plan.pinned is not None
    beside = stack.estimate("dp=4", cluster=cluster, pins=pins)
    (row,) = stack.scale([parse(cluster)], [1], pins=pins).rows
    assert beside.plan_seconds == row.step_seconds == plan.estimate.step_seconds
