"""The peak of a step, against the bytes that PyTorch's allocator really held."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import shardfold as sf
from shardfold.runtime.parallelize import parallelize
from shardfold.simulate import simulate
from shardfold.zoo import build


def measured_bytes(module, args, kwargs):
    """The most that a forward and a backward held at once, beside what was there before."""

    def step():
        module.accumulate(*args, **kwargs)
        module.zero_grad(set_to_none=True)

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.mark.parametrize("recompute", ["never", "always", "products"])
@pytest.mark.parametrize("name", ["vit-large", "llama3-8b"])
def test_one_device_holds_what_is_predicted(name, recompute):
    torch.set_num_threads(1)
    seq = None if name == "vit-large" else 64
    model, args, kwargs = build(name, batch=2, seq=seq, layers=4, hidden=128, device="cpu")
    plan = sf.plan(model, args, kwargs, cluster="1xcpu", recompute=recompute)
    assert bool(plan.recompute) == (recompute != "never")
    predicted = simulate(plan.schedule).peak_bytes - sum(plan.schedule.resident.values())
    assert predicted == pytest.approx(
        measured_bytes(parallelize(model, plan, args, kwargs), args, kwargs), rel=0.01
    )


@pytest.mark.parametrize("passes", [2, 4])
def test_micro_batches_hold_what_is_predicted(passes):
    """One pass's activations, beside the gradients of all."""
    torch.set_num_threads(1)
    model, args, kwargs = build(
        "llama3-8b-tiny", batch=8, seq=64, layers=4, hidden=128, device="cpu"
    )
    plan = sf.plan(model, args, kwargs, cluster="1xcpu", micro_batches=passes)
    resident = plan.schedule.resident
    before = sum(resident.values()) - resident["gradients"]
    predicted = simulate(plan.schedule).peak_bytes - before
    assert predicted == pytest.approx(
        measured_bytes(parallelize(model, plan, args, kwargs), args, kwargs), rel=0.01
    )
