"""A stated strategy is priced as the baseline of its name, and ZeRO keeps what it says."""

from __future__ import annotations

from functools import cache

import pytest

from shardfold import zoo
from shardfold.api import Planner
from shardfold.errors import InputError
from shardfold.planner.estimate import Estimated

CLUSTER = "2x4xa100"


@cache
def planner() -> Planner:
    pytest.importorskip("transformers")
    module, args, kwargs = zoo.build("llama3-8b-tiny", batch=16, layers=4)
    return Planner(module, args, kwargs, cluster=CLUSTER)


@cache
def estimated(strategy: str) -> Estimated:
    return planner().estimate(strategy, beside_plan=False)


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
    plain, one, two = estimated("dp=8"), estimated("zero=1"), estimated("zero=2")
    for found in (one, two):
        halves = kinds(found)
        assert halves["reduce_scatter"] == pytest.approx(halves["all_gather"])
        sent = halves["reduce_scatter"] + halves["all_gather"] + halves.get("all_reduce", 0.0)
        assert sent == pytest.approx(kinds(plain)["all_reduce"])
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
        ("fsdp=8 recompute=full", "no repeated blocks"),
    ],
)
def test_a_word_that_the_model_has_nothing_for_is_refused(strategy: str, says: str) -> None:
    module, args, kwargs = zoo.build("alexnet-tiny")
    with pytest.raises(InputError, match=says):
        Planner(module, args, kwargs, cluster=CLUSTER).estimate(strategy)


def test_the_plan_beside_is_no_slower() -> None:
    found = planner().estimate("fsdp=8")
    assert found.plan_seconds is not None
    assert found.plan_seconds <= found.step_seconds * (1 + 1e-9)
