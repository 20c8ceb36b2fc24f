"""Pipelines of equal layers beside the plan: as `estimate` states them, and never faster."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shardfold.api import Planner
from shardfold.pipeline.cut import equal
from shardfold.planner.compare_methods import Result
from shardfold.planner.equal_layers import SCHEDULES
from shardfold.plans import load

from .test_pipelines import Mean
from .test_staged import planner

METHODS = ("selected", *SCHEDULES)
WORDS = {"gpipe": "gpipe", "1f1b": "1f1b", "interleaved": "interleaved virtual={}"}


def results(stack: Planner, cluster: str, **options: object) -> dict[str, Result]:
    given = {"prefer": "speed", "pipeline": "auto", "methods": METHODS, **options}
    found = stack.compare(cluster=cluster, **given)  # type: ignore[arg-type]
    return {each.method: each for each in found.results}


def test_of_single_devices_they_are_the_best_that_can_be_stated() -> None:
    """Two stages of one device each leave nothing to choose but micro-batches and chunks."""
    stack = planner(layers=6, tied=True)
    found = results(stack, "2xa100")
    for schedule in SCHEDULES:
        chunks = (2,) if schedule == "interleaved" else (1,)
        steps = [
            stack.estimate(
                f"pp=2 micro-batches={m} schedule={WORDS[schedule].format(n)}",
                cluster="2xa100",
                beside_plan=False,
            ).step_seconds
            for m in (2, 4, 8, 16)
            for n in chunks
        ]
        assert found[schedule].step_seconds == pytest.approx(min(steps), rel=1e-9)


def test_no_pipeline_of_equal_layers_is_faster_than_the_plan(slow: str, tmp_path: Path) -> None:
    stack = planner(layers=6, tied=True)
    found = results(stack, slow, micro_batches=8, save_plans=tmp_path)
    step = found["selected"].step_seconds
    assert step is not None
    assert "stages" in found["selected"].note
    for schedule in SCHEDULES:
        one = found[schedule]
        assert one.fits
        assert one.step_seconds is not None
        assert step <= one.step_seconds * (1 + 1e-9)
        plan = load(tmp_path / f"{schedule}.json")
        assert plan.pipeline is not None
        assert plan.pipeline.schedule == schedule
        assert list(plan.pipeline.layers) == equal(6, plan.pipeline.parts * plan.pipeline.chunks)
        assert plan.estimate.step_seconds == one.step_seconds
    for degrees in ("pp=2 dp=2", "pp=2 fsdp=2", "pp=4"):
        stated = stack.estimate(f"{degrees} micro-batches=8", cluster=slow, beside_plan=False)
        assert found["1f1b"].step_seconds <= stated.step_seconds * (1 + 1e-9), degrees


def test_within_a_limit_less_in_flight_comes_before_the_faster() -> None:
    stack = planner(layers=6)
    asked = {"recompute": "never", "micro_batches": 8}
    free = results(stack, "2xa100", **asked)
    limit = free["1f1b"].peak_bytes
    assert limit is not None
    bound = results(stack, "2xa100", memory_limit=limit, **asked)
    assert bound["1f1b"].fits
    assert bound["1f1b"].step_seconds == free["1f1b"].step_seconds
    assert free["gpipe"].peak_bytes > limit
    assert not bound["gpipe"].fits


@pytest.mark.parametrize(
    ("model", "cluster", "options", "said"),
    [
        (Mean(), "2x2xa100", {}, "no list of layers to cut"),
        (nn.Sequential(nn.Linear(8, 8)), "1xa100", {}, "One device has no stages"),
        (Mean(), "2x2xa100", {"cost": "paper", "pipeline": "off"}, "Stages are simulated"),
    ],
)
def test_where_there_are_none_the_reason_is_said(
    model: nn.Module, cluster: str, options: dict[str, object], said: str
) -> None:
    stack = Planner(model, (torch.zeros(4, 8),), loss=lambda x: x.sum())
    for schedule in SCHEDULES:
        found = results(stack, cluster, **options)[schedule]
        assert found.step_seconds is None
        assert said in found.note
