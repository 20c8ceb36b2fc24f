"""All that a stack can be told: legal, each once, and complete for a small cluster."""

from __future__ import annotations

import pytest

from shardfold.cluster import parse
from shardfold.errors import InputError
from shardfold.export.targets import (
    TARGETS,
    Sizes,
    configurations,
    divisors,
    samples_per_pass,
    target_named,
)
from shardfold.strategies.stated import parse_strategy


@pytest.mark.parametrize("name", TARGETS)
def test_every_configuration_is_one_that_can_be_stated(name: str) -> None:
    cluster, sizes = parse("4x8xh100"), Sizes(64, 32, experts=8)
    found = list(configurations(TARGETS[name], cluster, sizes))
    assert len(found) == len(set(found)) > 10
    for stated in found:
        assert parse_strategy(str(stated), cluster.size) == stated
        assert stated.data * stated.tensor * stated.stages == 32
        assert samples_per_pass(stated, 64) * stated.batch_parts * stated.micro_batches == 64
        assert stated.tensor <= 8
        assert not TARGETS[name].refusal(stated)


def test_a_small_space_is_known_by_heart() -> None:
    found = configurations(TARGETS["accelerate"], parse("2xa100"), Sizes(4, 2))
    assert sorted(map(str, found)) == [
        "fsdp=2",
        "fsdp=2 micro-batches=2",
        "fsdp=2 recompute=full",
        "fsdp=2 recompute=full micro-batches=2",
        "fsdp=2 reshard=never",
        "fsdp=2 reshard=never micro-batches=2",
        "fsdp=2 reshard=never recompute=full",
        "fsdp=2 reshard=never recompute=full micro-batches=2",
    ]


def test_tensor_parallel_alone_is_in_float32() -> None:
    for stack in ("accelerate", "hf"):
        whole = Sizes(4, 2, is_half=False)
        alone = [s for s in configurations(TARGETS[stack], parse("2xa100"), whole) if s.tensor == 2]
        assert {str(each) for each in alone} >= {"tp=2", "tp=2 recompute=full"}
        half = configurations(TARGETS[stack], parse("2xa100"), Sizes(4, 2))
        assert all(each.tensor == 1 for each in half)


def test_a_batch_that_is_not_cut_has_one_micro_batch() -> None:
    found = configurations(TARGETS["megatron"], parse("2x4xa100"), Sizes(8, 8, is_cut=False))
    assert {(each.micro_batches, each.stages) for each in found} == {(1, 1)}


@pytest.mark.parametrize(
    ("stack", "strategy", "says"),
    [
        ("accelerate", "pp=2 fsdp=4 micro-batches=2", "no pipelines"),
        ("megatron", "fsdp=8", "no ZeRO stage 3"),
        ("megatron", "pp=2 dp=4 micro-batches=4 schedule=zbv", "no schedule zbv"),
        ("accelerate", "dp=4 tp=2", "no ZeRO stage 0"),
        ("torchtitan", "tp=8 sp", "two or more FSDP shards"),
        ("deepspeed", "dp=2 fsdp=4", "no replicas of shards"),
        ("hf", "fsdp=8 reshard=never", "again in backward"),
        ("hf", "fsdp=8 recompute=selective", "no recompute=selective"),
        ("torchtitan", "fsdp=4 tp=2", "with sp"),
        ("torchtitan", "fsdp=8 ep=8", "expert parallel"),
        ("megatron", "dp=4 cp=2 attention=gather", "attention=gather"),
    ],
)
def test_what_a_stack_cannot_be_told_has_a_reason(stack: str, strategy: str, says: str) -> None:
    assert says in TARGETS[stack].refusal(parse_strategy(strategy, 8))


def test_names_and_versions_that_are_not_known_are_refused() -> None:
    assert target_named("torchtitan")[1] == "0.3.0"
    assert target_named("nanotron@0.4")[0].recompute == ("none",)
    with pytest.raises(InputError, match="Did you mean torchtitan"):
        target_named("torchtitans")
    with pytest.raises(
        InputError, match=r"megatron 0\.9 were not checked\. Checked: megatron@0\.16"
    ):
        target_named("megatron@0.9")


def test_parts_that_fsdp_gathers_once_lie_beside_master_weights() -> None:
    target = TARGETS["torchtitan"]
    once, again = (
        parse_strategy(text, 8) for text in ("pp=2 dp=4 zero=1 micro-batches=2", "fsdp=8")
    )
    assert target.stack(once).master_weights
    assert not target.stack(once).float32_parts
    assert target.stack(again).float32_parts


def test_divisors() -> None:
    assert divisors(1) == [1]
    assert divisors(72) == [1, 2, 3, 4, 6, 8, 9, 12, 18, 24, 36, 72]
