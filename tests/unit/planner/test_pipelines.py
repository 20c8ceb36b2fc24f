"""Searched pipelines: cut as brute force would, no slower than equal layers, kept in plan files."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from shardfold.api import Planner
from shardfold.cli import main
from shardfold.cluster import parse
from shardfold.errors import ClusterError, InputError, PlanError
from shardfold.planner.pipeline_plan import stage_numbers
from shardfold.plans import Plan
from shardfold.plans.drawing_data import stage_timeline
from shardfold.plans.files import dumps, loads
from shardfold.plans.plan import TiedSum


def test_stages_take_what_the_levels_allow() -> None:
    assert stage_numbers(parse("4x8xh100")) == [2, 4, 8, 16, 32]
    assert stage_numbers(parse("6xh100")) == [2, 3, 6]


def test_where_links_are_slow_stages_win_and_no_stated_pipeline_is_faster(
    stack: Planner, slow: str, piped: Plan
) -> None:
    assert piped.pipeline is not None
    plain = stack.plan(cluster=slow, pipeline="off", micro_batches=8)
    assert plain.pipeline is None
    assert piped.estimate.step_seconds < plain.estimate.step_seconds
    for degrees in ("pp=2 dp=2", "pp=2 fsdp=2", "pp=4"):
        for schedule in ("1f1b", "gpipe", "interleaved virtual=2"):
            if schedule.startswith("inter") and degrees == "pp=4":
                continue  # 8 stages of 6 layers
            text = f"{degrees} micro-batches=8 schedule={schedule}"
            stated = stack.estimate(text, cluster=slow, beside_plan=False)
            assert piped.estimate.step_seconds <= stated.step_seconds * (1 + 1e-9), text


def test_a_plan_with_stages_says_them_and_is_kept_in_a_file(piped: Plan, tmp_path: Path) -> None:
    entry = piped.pipeline
    assert entry is not None
    assert sum(entry.layers) == 6
    assert len(entry.stages) == entry.parts
    assert piped.processes == 4
    assert loads(dumps(piped)) == piped
    text = str(piped)
    assert f"Pipeline: {entry.parts} parts of the cluster" in text
    assert "8 micro-batches, bubble" in text
    assert "Without stages the best step is" in text
    assert max(stage.peak_bytes for stage in entry.stages) == piped.estimate.peak_bytes


def test_a_plan_states_how_far_other_pipelines_can_be(stack: Planner, piped: Plan) -> None:
    bound = piped.estimate.pipeline_lower_bound_seconds
    assert bound is not None
    assert 0 < bound <= piped.estimate.step_seconds
    said = "No pipeline in the search has a step that is more than"
    assert said in " ".join(str(piped).split())
    free = stack.plan(cluster="2x2xa100", prefer="speed", micro_batches=4)
    least = free.estimate.pipeline_lower_bound_seconds
    assert least is not None
    for stages in (2, 4):
        asked = stack.plan(cluster="2x2xa100", pipeline=stages, micro_batches=4)
        assert least <= asked.estimate.step_seconds
    off = stack.plan(cluster="2x2xa100", pipeline="off")
    assert off.estimate.pipeline_lower_bound_seconds is None


def test_the_stages_over_time_end_with_the_step(piped: Plan, tmp_path: Path) -> None:
    entry, found = piped.pipeline, stage_timeline(piped)
    assert entry is not None
    assert found.streams == tuple(f"part {k + 1}" for k in range(entry.parts))
    assert max(s.end_seconds for s in found.spans) == pytest.approx(piped.estimate.step_seconds)
    for stream in found.streams:
        own = [span for span in found.spans if span.stream == stream]
        assert all(a.end_seconds <= b.start_seconds + 1e-15 for a, b in pairwise(own))
        passes = 2 * entry.chunks * piped.micro_batches
        assert sum(span.operator[0].isdigit() for span in own) == passes
    piped.save(tmp_path / "plan.json")
    trace = tmp_path / "trace.json"
    ran = CliRunner().invoke(main, ["simulate", str(tmp_path / "plan.json"), "--trace", str(trace)])
    assert ran.exit_code == 0, ran.output
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(found.spans)
    assert "part 1" in piped.to_html()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schedule": "1g1c"}, "schedule '1g1c'.*1f1b"),
        ({"layers": (6,)}, "lists the layers of 1 stages"),
        ({"tied": (TiedSum((99,), 1.0),)}, "sums gradients over others"),
        ({"parts": 3}, "have 6 devices, its cluster 4"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(
    piped: Plan, change: dict[str, object], said: str
) -> None:
    assert piped.pipeline is not None
    entry = msgspec.structs.replace(piped.pipeline, **change)
    mesh = piped.mesh
    if "parts" in change:
        mesh = (msgspec.structs.replace(mesh[0], size=2), *mesh[1:]) if mesh else ()
    wrong = msgspec.structs.replace(piped, pipeline=entry, mesh=mesh)
    if "parts" in change and not mesh:
        said = "have 3 devices, its cluster 4"
    with pytest.raises(PlanError, match=said):
        loads(dumps(wrong))


def test_a_model_without_layers_has_no_stages() -> None:
    plain = Planner(Mean(), (torch.zeros(4, 8),))
    assert plain.plan(cluster="2x2xa100").pipeline is None
    with pytest.raises(InputError, match="no list of layers to cut"):
        plain.plan(cluster="2x2xa100", pipeline=2)


class Batches(nn.Module):
    """Layers that take no fewer samples at once."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least
        linear, relu = partial(nn.Linear, 64, 64), nn.ReLU
        self.layers = nn.ModuleList(
            nn.Sequential(linear(), relu(), linear(), relu()) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) < self.least:
            raise ValueError("too few samples")
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_where_the_usual_number_of_micro_batches_is_refused_others_are_tried() -> None:
    found = Planner(Batches(16), (torch.zeros(64, 64),), cluster="4xa100").plan(pipeline=2)
    assert found.pipeline is not None
    assert found.micro_batches in (2, 4)


class Mean(nn.Module):
    """One layer, and no list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"pipeline": 3}, ClusterError, "pp=3 does not lie along the cluster"),
        (
            {"pipeline": 16, "cluster": "2x8xa100"},
            InputError,
            "pipeline=16: the model has 6 layers.*Try pipeline=4",
        ),
        ({"pipeline": 2, "micro_batches": 3}, InputError, "cannot be cut into 3"),
        ({"pipeline": "of"}, InputError, "Unknown number of stages 'of'.*off"),
        ({"pipeline": 0}, InputError, "1 stage or more"),
        ({"pipeline": 2, "pins": {"head": "out/2"}}, InputError, "neither pins nor a mesh"),
        ({"pipeline": 2, "cost": "paper"}, InputError, "Stages are simulated"),
    ],
)
def test_what_cannot_be_is_refused(
    stack: Planner, options: dict[str, object], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        stack.plan(**{"cluster": "2x2xa100", **options})  # type: ignore[arg-type]
