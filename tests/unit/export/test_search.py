"""The search for a stack prices few configurations, and the best of them is the best of all."""

from __future__ import annotations

from functools import cache

import pytest

from shardfold import zoo
from shardfold.api import Planner
from shardfold.cluster import parse
from shardfold.errors import InfeasibleError, InputError
from shardfold.export.search import Anchors, Found, Priced, Prices, search
from shardfold.export.stack_plan import TIE
from shardfold.export.targets import (
    TARGETS,
    Sizes,
    configurations,
    samples_per_pass,
    target_named,
)
from shardfold.planner.options import Request
from shardfold.strategies.stated import parse_strategy

CLUSTER, SAMPLES, LAYERS = "2x2xa100", 8, 2


@cache
def planner() -> Planner:
    pytest.importorskip("transformers")
    module, args, kwargs = zoo.build("llama3-8b-tiny", batch=SAMPLES, seq=512, layers=LAYERS)
    return Planner(module, args, kwargs, cluster=CLUSTER, dtype="bf16", cost="roofline")


@cache
def prices(stack: str) -> Prices:
    own = planner()
    asked = own._asked(Request(), None, own.options)
    return Prices(lambda s: own._stated_graph(asked, s), asked.search, target_named(stack)[0])


@cache
def every(stack: str) -> tuple[Priced, ...]:
    """All that a stack can be told, priced one by one."""
    target, cluster = target_named(stack)[0], planner().cluster
    assert cluster is not None
    found = []
    for stated in configurations(target, cluster, Sizes(SAMPLES, LAYERS)):
        try:
            found.append(Priced(stated, prices(stack).estimate(stated)))
        except InputError:
            continue
    return tuple(found)


def searched(stack: str, limit: float) -> Found:
    own = planner()
    asked = own._asked(Request(), None, {**own.options, "memory_limit": limit})
    at = Prices(prices(stack).graphs, asked.search, target_named(stack)[0])
    choices = [each.stated for each in every(stack)]
    return search(at, choices, SAMPLES, lambda done, total: None)


@pytest.mark.parametrize("stack", ["torchtitan", "megatron"])
def test_the_best_of_few_is_the_best_of_all(stack: str) -> None:
    peaks = sorted(each.estimated.peak_bytes for each in every(stack))
    assert len(peaks) > 10
    counts = []
    assert searched(stack, 2**20).priced[0].estimated.peak_bytes == pytest.approx(peaks[0])
    for limit in (peaks[len(peaks) // 4], peaks[-1] * 2):
        found = searched(stack, limit)
        best = min(
            each.estimated.step_seconds
            for each in every(stack)
            if each.estimated.peak_bytes <= limit
        )
        assert found.priced[0].estimated.fits
        assert found.priced[0].estimated.step_seconds == pytest.approx(best, rel=1e-9)
        counts.append(len(found.priced))
    assert max(counts) <= len(peaks)
    assert min(counts) < len(peaks)


@pytest.mark.parametrize("stack", ["torchtitan", "megatron"])
def test_bounds_are_below_what_is_priced(stack: str) -> None:
    anchors = Anchors(prices(stack), SAMPLES)
    for each in every(stack):
        for size in (None, samples_per_pass(each.stated, SAMPLES)):
            anchor, found = anchors.of(each.stated, size), each.estimated
            assert anchor.step_seconds(each.stated, SAMPLES) <= found.step_seconds, str(each.stated)
            assert anchor.peak_bytes(each.stated, SAMPLES) <= found.peak_bytes, str(each.stated)


def test_what_does_not_fit_is_refused_with_the_least_that_is_needed() -> None:
    with pytest.raises(InfeasibleError, match="another stack") as refusal:
        planner().plan_for("accelerate", memory_limit="1MiB", beside_plan=False)
    assert refusal.value.needed_bytes > 2**20


def test_a_plan_for_a_stack_says_all_that_it_comes_to() -> None:
    found = planner().plan_for("accelerate")
    assert found.estimated.fits
    assert found.estimated.plan_seconds is not None
    assert 0.5 < found.estimated.plan_seconds / found.estimated.step_seconds < 1.1
    plain = found.as_plain()
    assert plain["stack"] == "accelerate"
    assert plain["text"] == found.text
    fitting = [e.estimated.step_seconds for e in found.runners_up if e.estimated.fits]
    assert fitting == sorted(fitting)
    assert found.estimated.step_seconds <= fitting[0] * (1 + TIE)
    assert found.possible >= found.priced > len(fitting)


def test_a_batch_of_fewer_samples_than_devices_is_searched() -> None:
    module, args, kwargs = zoo.build("llama3-8b-tiny", batch=2, layers=LAYERS)
    own = Planner(module, args, kwargs, cluster=CLUSTER, dtype="bf16", cost="roofline")
    assert own.plan_for("megatron", beside_plan=False).strategy.batch_parts <= 2


def test_bounds_hold_where_rows_are_sent_to_experts() -> None:
    module, args, kwargs = zoo.build("mixtral-8x7b-tiny", batch=SAMPLES, layers=LAYERS)
    own = Planner(module, args, kwargs, cluster=CLUSTER, dtype="bf16", cost="roofline")
    found, _, sizes = own._priced_for(own._asked(Request(), None, own.options), TARGETS["megatron"])
    anchors, cluster = Anchors(found, SAMPLES), parse(CLUSTER)
    choices = configurations(TARGETS["megatron"], cluster, sizes, 2)
    several = [each for each in choices if each.experts > 1 and each.recompute == "none"]
    assert {each.experts for each in several} == {2, 4}
    for each in several:
        figures = found.estimate(each)
        for size in (None, samples_per_pass(each, SAMPLES)):
            anchor = anchors.of(each, size)
            assert anchor.step_seconds(each, SAMPLES) <= figures.step_seconds, str(each)
            assert anchor.peak_bytes(each, SAMPLES) <= figures.peak_bytes, str(each)


def test_a_micro_batch_may_be_one_sample() -> None:
    """Of which a copy that has nothing to do is left out."""
    found = planner().estimate("tp=4 micro-batches=8", beside_plan=False)
    assert 0 < found.peak_bytes < planner().estimate("tp=4", beside_plan=False).peak_bytes


def test_gradients_in_16_bits_are_told_priced_and_searched() -> None:
    own, half = planner(), "bf16-mixed/bf16"
    told = "--grad-reduce-in-bf16"
    assert told in own.plan_for("megatron", dtype=half, beside_plan=False).text
    assert told not in own.plan_for("megatron", beside_plan=False).text
    words = "dp=4 zero=1 micro-batches=2"
    wide, narrow = (
        own.estimate(words, stack="megatron", dtype=each, beside_plan=False)
        for each in ("bf16-mixed", half)
    )
    gradients = wide.peak_by_class["gradients"]
    assert narrow.peak_by_class["gradients"] == gradients / 2
    sent = [{c.kind: c.seconds for c in each.communication} for each in (wide, narrow)]
    assert sent[1]["reduce_scatter"] < sent[0]["reduce_scatter"]
    for stack in ("torchtitan", "hf", "nanotron"):
        with pytest.raises(InputError, match=r"float32.* In bf16 reduce: megatron, accelerate"):
            own.plan_for(stack, dtype=half, beside_plan=False)


def test_a_configuration_has_the_figures_of_estimate() -> None:
    words = "pp=2 dp=2 zero=1 micro-batches=2"
    found = prices("megatron").estimate(parse_strategy(words, 4))
    same = planner().estimate(words, stack=TARGETS["megatron"].habits, beside_plan=False)
    assert (found.step_seconds, found.peak_bytes) == (same.step_seconds, same.peak_bytes)


def test_costs_without_overlap_are_refused() -> None:
    with pytest.raises(InputError, match=r"simulated with overlap, .* --cost kernels"):
        planner().plan_for("megatron", cost="paper", beside_plan=False)


def test_a_number_of_micro_batches_is_kept() -> None:
    found = planner().plan_for("megatron", micro_batches=4, beside_plan=False)
    assert found.strategy.micro_batches == 4
    assert all(each.stated.micro_batches == 4 for each in found.runners_up)


def test_a_model_without_a_tensor_plan_has_no_tensor_parallel_where_one_is_read() -> None:
    module, args, kwargs = zoo.build("transformer-tiny", layers=2)
    own = Planner(module, args, kwargs, cluster="4xa100", cost="roofline")
    found = own.plan_for("deepspeed", beside_plan=False)
    assert found.strategy.tensor == 1
    assert any("base_model_tp_plan" in note for note in found.notes)


def test_a_model_that_a_stack_does_not_have_is_refused() -> None:
    module, args, kwargs = zoo.build("alexnet-tiny")
    own = Planner(module, args, kwargs, cluster="2xa100", cost="roofline")
    for stack in ("torchtitan", "megatron", "nanotron"):
        says = f"{stack} trains transformers of its own, .* any module: hf, accelerate, deepspeed"
        with pytest.raises(InputError, match=says):
            own.plan_for(stack, beside_plan=False)
    assert own.plan_for("deepspeed", beside_plan=False).text
