"""A plan in another stack's words: its degrees are read, the nearest is priced, losses add up."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from shardfold import zoo
from shardfold.api import Planner
from shardfold.cluster import parse
from shardfold.errors import InputError, PlanError
from shardfold.export.dtensor import as_dtensor, placement
from shardfold.export.projection import degrees_of, nearest
from shardfold.export.targets import TARGETS, Sizes, configurations
from shardfold.plans import Plan
from shardfold.report.stack_text import projection_lines
from shardfold.strategies.stated import parse_strategy


@cache
def planner() -> Planner:
    pytest.importorskip("transformers")
    module, args, kwargs = zoo.build("llama3-8b-tiny", batch=8, layers=2)
    return Planner(module, args, kwargs, cluster="2x2xa100", dtype="bf16", cost="roofline")


@cache
def plan_of(method: str, dtype: str = "bf16") -> Plan:
    """The plan of a baseline: its degrees are known."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        planner().compare(methods=(method,), save_plans=folder, mesh="2x2", dtype=dtype)
        return Plan.load(Path(folder) / f"{method}.json")


@pytest.mark.parametrize(
    ("method", "degrees"),
    [
        ("data-parallel", "dp=4"),
        ("fsdp", "fsdp=4"),
        ("zero-2", "fsdp=4 reshard=never"),
        ("hsdp", "dp=2 fsdp=2"),
        ("megatron", "dp=2 tp=2"),
        ("megatron+sp", "dp=2 tp=2 sp"),
        ("fsdp+tp+sp", "fsdp=2 tp=2 sp"),
    ],
)
def test_degrees_are_those_of_the_baseline(method: str, degrees: str) -> None:
    assert str(degrees_of(plan_of(method))) == degrees


def test_the_stages_of_a_pipeline_are_read() -> None:
    plan = planner().plan(pipeline=2, micro_batches=4)
    assert plan.pipeline is not None
    found = degrees_of(plan)
    assert (found.stages, found.schedule) == (2, plan.pipeline.schedule)
    assert found.data * found.tensor == 2
    projected = planner().export(plan, "megatron")
    assert projected.strategy.stages == 2
    assert "--pipeline-model-parallel-size 2" in projected.written.text


@pytest.mark.parametrize(
    ("stack", "strategy", "found"),
    [
        ("hf", "fsdp=2 tp=2 sp", "fsdp=2 tp=2"),
        ("accelerate", "fsdp=2 tp=2 sp", "fsdp=2 tp=2"),
        ("megatron", "fsdp=4", "dp=4 zero=1"),
        ("torchtitan", "dp=2 fsdp=2 reshard=never", "dp=2 fsdp=2 reshard=never"),
        ("deepspeed", "fsdp=4 micro-batches=2", "fsdp=4 micro-batches=2"),
    ],
)
def test_the_nearest_configuration_has_the_same_degrees(
    stack: str, strategy: str, found: str
) -> None:
    choices = list(configurations(TARGETS[stack], parse("2x2xa100"), Sizes(8, 2)))
    assert str(nearest(parse_strategy(strategy, 4), choices)) == found


@pytest.mark.parametrize("dtype", ["bf16", "bf16-mixed"])
def test_a_baseline_is_projected_onto_itself_and_only_habits_cost(dtype: str) -> None:
    found = planner().export(plan_of("fsdp", dtype), "accelerate")
    assert str(found.strategy) == "fsdp=4"
    pattern, habits = found.causes
    assert pattern.seconds == pytest.approx(0.0, abs=1e-9)
    assert abs(habits.seconds) > 0
    assert found.unsaid == ()


def test_a_plan_of_another_batch_or_of_none_that_can_be_shared_is_refused() -> None:
    module, args, kwargs = zoo.build("llama3-8b-tiny", batch=5, layers=2)
    other = Planner(module, args, kwargs, cluster="2x2xa100", dtype="bf16", cost="roofline")
    with pytest.raises(PlanError, match=r"another model: .*another batch size"):
        other.export(plan_of("fsdp"), "megatron")
    with pytest.raises(InputError, match=r"hf has no configuration for a batch of 5 samples on 4"):
        other.export(other.plan(mesh="2x2"), "hf")


def test_causes_add_up_to_the_loss() -> None:
    for stack in ("megatron", "deepspeed"):
        found = planner().export(plan_of("fsdp+tp+sp"), stack)
        lost = found.estimated.step_seconds - found.plan_seconds
        assert sum(each.seconds for each in found.causes) == pytest.approx(lost, rel=1e-9)
        assert any("sp" in text or "ZeRO" in text for text in found.unsaid)
        lines = "\n".join(projection_lines(found, "llama"))
        assert f"What {found.stack} cannot express:" in lines
        assert found.as_plain()["text"] == found.written.text


def test_placements_are_those_of_the_plan() -> None:
    plan = plan_of("megatron")
    found = as_dtensor(plan)
    assert found["mesh"] == {"shape": [2, 2], "names": [axis.name for axis in plan.mesh]}
    name = "model.model.layers.0.mlp.up_proj.weight"
    assert found["parameters"][name]["placements"] == ["Replicate()", "Shard(0)"]
    name = "model.model.layers.0.mlp.down_proj.weight"
    assert found["parameters"][name]["placements"] == ["Replicate()", "Shard(1)"]
    (inner,) = (found["parallelize_module"][axis.name] for axis in plan.mesh[1:])
    assert inner["model.model.layers.1.mlp.up_proj"] == "ColwiseParallel"
    assert inner["model.model.layers.1.mlp.down_proj"] == "RowwiseParallel"
    assert inner["model.model.layers.1.self_attn.o_proj"] == "RowwiseParallel"
    assert len(found["activations"]) == len(plan.operators)
    json.dumps(found)


def test_placements_are_what_torch_says_of_the_parameters() -> None:
    """Every text is a placement of torch, one for each axis."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    names = {"Shard": Shard, "Replicate": Replicate, "Partial": Partial}
    found = as_dtensor(plan_of("fsdp+tp+sp"))
    for entry in found["parameters"].values():
        made = [eval(text, names) for text in entry["placements"]]
        assert len(made) == 2
        assert not any(isinstance(each, Partial) for each in made)


def test_a_piece_of_a_dim_is_unsaid() -> None:
    assert placement("dim 0.1") is None
    assert placement("replicated, gradient partial") == "Replicate()"
