"""A stated strategy is priced as the baseline of its name, and ZeRO keeps what it says."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from shardfold import zoo
from shardfold.api import Planner
from shardfold.cluster import parse
from shardfold.costs.model import TREE
from shardfold.errors import InputError
from shardfold.planner.estimated import Estimated
from shardfold.strategies.stacks import STACKS

CLUSTER = "2x4xa100"


@cache
def planner(optimizer: str = "adamw") -> Planner:
    pytest.importorskip("transformers")
    module, args, kwargs = zoo.build("llama3-8b-tiny", batch=16, layers=4)
    return Planner(module, args, kwargs, cluster=CLUSTER, optimizer=optimizer)


@cache
def estimated(strategy: str, optimizer: str = "adamw") -> Estimated:
    return planner(optimizer).estimate(strategy, beside_plan=False)


def kinds(found: Estimated) -> dict[str, float]:
    return {each.kind: each.seconds for each in found.communication}


@cache
def compared() -> dict[str, tuple[float | None, float | None]]:
    found = planner().compare(methods=("data-parallel", "fsdp", "hsdp"), mesh="2x4")
    return {each.method: (each.step_seconds, each.peak_bytes) for each in found.results}


@pytest.mark.parametrize(
    ("strategy", "name"),
    [("dp=8", "data-parallel"), ("fsdp=8", "fsdp"), ("dp=2 fsdp=4", "hsdp")],
)
def test_a_strategy_with_a_name_is_priced_as_its_baseline(strategy: str, name: str) -> None:
    found = estimated(strategy)
    assert (found.step_seconds, found.peak_bytes) == pytest.approx(compared()[name], rel=1e-9)


def test_zero_splits_an_all_reduce_in_two_and_keeps_parts_of_the_state() -> None:
    # Momentum: no copies of the state are made for an update.
    plain, one, two = (estimated(s, "momentum") for s in ("dp=8", "zero=1", "zero=2"))
    for found in (one, two):
        halves = kinds(found)
        assert halves["reduce_scatter"] == pytest.approx(halves["all_gather"])
        sent = halves["reduce_scatter"] + halves["all_gather"] + halves.get("all_reduce", 0.0)
        assert sent > 0.99 * kinds(plain)["all_reduce"]  # which may go by a tree
        assert found.peak_by_class["parameters"] == plain.peak_by_class["parameters"]
        assert found.peak_by_class["optimizer"] == pytest.approx(
            plain.peak_by_class["optimizer"] / 8
        )


def test_zero_1_reduces_once_in_a_step_and_zero_2_in_every_micro_batch() -> None:
    one, two = estimated("zero=1 micro-batches=2"), estimated("zero=2 micro-batches=2")
    assert kinds(two)["reduce_scatter"] == pytest.approx(2 * kinds(one)["reduce_scatter"])
    assert kinds(two)["all_gather"] == pytest.approx(kinds(one)["all_gather"])
    assert two.peak_by_class["gradients"] == pytest.approx(one.peak_by_class["gradients"] / 8)


def test_recomputed_work_counts_for_hfu_alone() -> None:
    kept, again = estimated("fsdp=8"), estimated("fsdp=8 recompute=full")
    assert kept.hfu == kept.mfu
    assert again.mfu < again.hfu < 4 / 3 * again.mfu * (1 + 1e-9)
    assert again.peak_by_class["activations"] < kept.peak_by_class["activations"]


def test_tensor_parallelism_splits_what_its_name_says() -> None:
    plain, sequence = estimated("dp=2 tp=4"), estimated("dp=2 tp=4 sp")
    assert plain.mesh == sequence.mesh == "2x4"
    assert kinds(plain)["all_reduce"] > kinds(sequence)["all_reduce"]
    assert {"all_gather", "reduce_scatter"} <= set(kinds(sequence))


def test_rates_are_of_tokens_and_of_a_whole_batch() -> None:
    whole, parts = estimated("dp=8"), estimated("dp=8 micro-batches=2")
    assert whole.unit == "tokens"
    tokens = planner().kwargs["input_ids"].numel()
    for found in (whole, parts):
        assert found.rate * found.step_seconds == pytest.approx(tokens)
        assert found.rate_per_device == pytest.approx(found.rate / 8)


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        ("dp=8 micro-batches=3", "cannot be cut into 3"),
        ("dp=8 micro-batches=4", "cannot be split into dp x fsdp = 8 parts"),
    ],
)
def test_a_degree_that_a_size_does_not_allow_is_refused(strategy: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        estimated(strategy)


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        ("tp=8", "no attention heads"),
        ("cp=8", "no attention over a sequence"),
        ("fsdp=8 recompute=full", "no repeated blocks"),
    ],
)
def test_a_word_that_the_model_has_nothing_for_is_refused(strategy: str, says: str) -> None:
    module, args, kwargs = zoo.build("alexnet-tiny")
    with pytest.raises(InputError, match=says):
        Planner(module, args, kwargs, cluster=CLUSTER).estimate(strategy)


def test_context_parallel_says_what_has_no_sequence() -> None:
    module, args, kwargs = zoo.build("vit-large-tiny")
    with pytest.raises(InputError, match=r"cp=2: .* has no sequence that can be split"):
        Planner(module, args, kwargs, cluster=CLUSTER).estimate("cp=2", beside_plan=False)


def test_the_plan_beside_is_no_slower() -> None:
    found = planner().estimate("fsdp=8", prefer="speed")
    assert found.plan_seconds is not None
    assert found.plan_seconds <= found.step_seconds * (1 + 1e-9)


@cache
def in_bf16(strategy: str, stack: str) -> Estimated:
    return planner().estimate(strategy, stack=stack, beside_plan=False, dtype="bf16")


def test_a_stack_keeps_master_weights_and_sends_gradients_in_float32() -> None:
    plain, mixed = (in_bf16("dp=8", stack) for stack in ("shardfold", "megatron"))
    sizes = mixed.peak_by_class
    assert sizes["parameters"] == plain.peak_by_class["parameters"]
    assert sizes["optimizer"] == pytest.approx(6 * sizes["parameters"])  # 12 bytes beside 2
    assert sizes["gradients"] == pytest.approx(2 * sizes["parameters"])
    narrow = in_bf16("dp=8", "internevo")
    assert kinds(mixed)["all_reduce"] > kinds(narrow)["all_reduce"]
    assert mixed.exposed_seconds > narrow.exposed_seconds  # after backward, not beside it


def test_gradients_that_share_a_bucket_share_its_hops() -> None:
    alone, together = (in_bf16("dp=8", stack) for stack in ("shardfold", "internevo"))
    (node, gpu), gradients = parse(CLUSTER).levels, alone.peak_by_class["parameters"]
    rate = TREE * min(gpu.bandwidth, 4 * node.bandwidth)
    by_tree = 2 * (node.latency_seconds + 2 * gpu.latency_seconds) + 2 * gradients / rate
    assert kinds(alone)["all_reduce"] > 10 * by_tree
    assert kinds(together)["all_reduce"] == pytest.approx(by_tree, rel=0.02)


def test_parameters_are_gathered_alike_whatever_type_gradients_are_sent_in() -> None:
    wide, narrow = (kinds(in_bf16("zero=1", stack)) for stack in ("megatron", "megatron-fp16"))
    assert wide["all_gather"] == pytest.approx(narrow["all_gather"])
    assert wide["reduce_scatter"] > narrow["reduce_scatter"]


def test_what_is_gathered_at_once_has_no_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = STACKS["nanotron"]
    for name, once in (("at once", True), ("in buckets", False)):
        small = replace(plain, name=name, bucket_bytes=1000.0, gathers_at_once=once)
        monkeypatch.setitem(STACKS, name, small)  # type: ignore[arg-type]
    once, parts = (kinds(in_bf16("zero=1", name)) for name in ("at once", "in buckets"))
    assert once["all_gather"] < parts["all_gather"] / 2
    assert once["reduce_scatter"] == pytest.approx(parts["reduce_scatter"])
    assert once["all_gather"] == pytest.approx(kinds(in_bf16("zero=1", "megatron"))["all_gather"])


def test_fsdp_stores_its_parts_in_float32() -> None:
    plain, mixed = (in_bf16("fsdp=8", stack) for stack in ("shardfold", "fsdp1"))
    sizes = mixed.peak_by_class
    assert sizes["optimizer"] + sizes["parameters"] == pytest.approx(6 * sizes["parameters"])
    assert kinds(mixed)["all_gather"] == pytest.approx(kinds(plain)["all_gather"])
    assert kinds(mixed)["reduce_scatter"] > kinds(plain)["reduce_scatter"]


def test_zero_1_in_groups_gathers_within_the_group() -> None:
    whole, grouped = estimated("zero=1"), estimated("dp=2 fsdp=4 zero=1")
    assert kinds(grouped)["all_gather"] < kinds(whole)["all_gather"] / 2


def test_selective_recomputation_runs_attention_again() -> None:
    kept, some, full = (estimated(f"dp=8 recompute={r}") for r in ("none", "selective", "full"))
    assert kept.hfu == kept.mfu
    assert kept.mfu < some.hfu / some.mfu * kept.mfu < full.hfu / full.mfu * kept.mfu


def test_a_stack_that_gathers_inputs_again_keeps_their_parts() -> None:
    kept, again = (in_bf16("dp=2 tp=4 sp", stack) for stack in ("nanotron", "megatron"))
    assert again.peak_by_class["activations"] < 0.9 * kept.peak_by_class["activations"]
    plain, same = (in_bf16("dp=8", stack) for stack in ("nanotron", "megatron"))
    assert plain.peak_by_class["activations"] == same.peak_by_class["activations"]


def test_buckets_and_flat_gradients_stay() -> None:
    found, bare = (in_bf16("zero=1", stack) for stack in ("megatron-deepspeed", "megatron-fp16"))
    extra = found.peak_by_class["buffers"] - bare.peak_by_class["buffers"]
    # a copy of the gradients, the float32 ones of an eighth, and two buckets of 5e8 items
    assert extra == pytest.approx(1.25 * found.peak_by_class["parameters"] + 2e9, rel=1e-3)


def test_gradients_that_are_reduced_after_backward_are_whole_until_then() -> None:
    stacks = ("deepspeed", "megatron-deepspeed")
    beside, after = (in_bf16("zero=2 micro-batches=2", stack) for stack in stacks)
    sizes = after.peak_by_class
    assert sizes["gradients"] == pytest.approx(sizes["parameters"])
    assert beside.peak_by_class["gradients"] == pytest.approx(sizes["parameters"] / 8)
    assert kinds(after)["reduce_scatter"] == pytest.approx(kinds(beside)["reduce_scatter"] / 2)


def test_attention_of_the_first_generation_is_slower_and_nothing_else_is() -> None:
    first, second = (in_bf16("dp=8", stack) for stack in ("internevo", "megatron-fp16"))
    assert first.compute_seconds > second.compute_seconds
    assert kinds(first) == pytest.approx(kinds(second))


def test_an_unknown_stack_is_named() -> None:
    with pytest.raises(InputError, match=r"Unknown stack 'megatron-lm'.*megatron"):
        planner().estimate("dp=8", stack="megatron-lm", beside_plan=False)


def test_a_sequence_is_split_along_cp_and_heads_in_attention() -> None:
    plain, split = estimated("dp=8"), estimated("dp=4 cp=2")
    assert "all_to_all" in kinds(split)
    assert "all_to_all" not in kinds(plain)
    assert split.peak_by_class["parameters"] == plain.peak_by_class["parameters"]
    assert split.compute_seconds == pytest.approx(plain.compute_seconds, rel=0.1)
    ring, gathered = (estimated(f"dp=4 cp=2 attention={how}") for how in ("ring", "gather"))
    assert "ring" in kinds(ring)
    assert not {"all_to_all", "ring"} & kinds(gathered).keys()
    whole, parts = (estimated(s, "momentum").peak_by_class for s in ("dp=8", "cp=2 dp=4 zero=1"))
    assert parts["optimizer"] == pytest.approx(whole["optimizer"] / 8)


def test_the_state_of_experts_is_in_as_many_parts_as_they_have_replicas() -> None:
    pytest.importorskip("transformers")
    module, args, kwargs = zoo.build("mixtral-8x7b-tiny", batch=16, layers=2)
    made = Planner(module, args, kwargs, cluster=CLUSTER)
    whole, parts = (
        made.estimate(f"dp=8 zero={zero} ep=4", beside_plan=False).peak_by_class["optimizer"]
        for zero in (0, 1)
    )
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    experts = sum(n for name, n in sizes.items() if ".experts." in name)
    others, own = sum(sizes.values()) - experts, experts / 4
    assert parts / whole == pytest.approx((others / 8 + own / 2) / (others + own), rel=1e-3)


class Everyone(nn.Module):
    """Experts that all meet every row."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.expand(4, *x.shape), self.matrices).sum(0).square().mean()


def test_experts_that_meet_every_row_are_named() -> None:
    made = Planner(Everyone(), (torch.randn(8, 16),), cluster=CLUSTER)
    with pytest.raises(InputError, match=r"ep=4: .* product of all rows with every matrix \(aten"):
        made.estimate("dp=8 ep=4", beside_plan=False)


def test_the_host_of_another_stack_asks_for_collectives() -> None:
    plain, other = (
        planner().estimate("tp=4", beside_plan=False, stack=n) for n in ("shardfold", "alpa")
    )
    assert other.compute_seconds == pytest.approx(plain.compute_seconds, rel=0.2)
    assert other.step_seconds > plain.step_seconds + 4 * 4 * 50e-6  # blocks, all-reduces, host
