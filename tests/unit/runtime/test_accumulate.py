"""`accumulate` on one device: the gradients of the whole batch, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardfold.api import plan as find_plan
from shardfold.errors import InputError, RunError
from shardfold.runtime import parallelize


class Net(nn.Module):
    """A small regression; its input may come in a dict, with the samples second."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, batch, scale):
        x = batch["x"].transpose(0, 1).flatten(1) * scale
        return nn.functional.mse_loss(self.down(torch.tanh(self.up(x))), batch["y"])


@pytest.fixture
def given():
    torch.manual_seed(0)
    batch = {"x": torch.randn(2, 12, 2), "y": torch.randn(12, 2)}
    return Net(), (batch,), {"scale": torch.tensor([1.0, 2.0, 3.0, 4.0])}


def split(given, passes):
    model, args, kwargs = given
    plan = find_plan(model, args, kwargs, cluster="cpu", micro_batches=passes)
    return plan, parallelize(model, plan, args, kwargs)


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_gradients_and_loss_are_those_of_the_whole_batch(given, passes):
    model, args, kwargs = given
    plan, module = split(given, passes)
    assert plan.micro_batch_dims == ({} if passes == 1 else {"0.x": 1, "0.y": 0})
    expected = model(*args, **kwargs)
    expected.backward()
    loss = module.accumulate(*args, **kwargs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)
    module.accumulate(*args, **kwargs)  # on top of what is there, as backward does
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * model.get_parameter(name).grad)


def test_in_eval_mode_there_is_no_backward(given):
    model, args, kwargs = given
    _, module = split(given, 3)
    module.eval()
    loss = module.accumulate(*args, **kwargs)
    assert loss.item() == pytest.approx(model(*args, **kwargs).item(), rel=1e-5)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_forward_takes_one_micro_batch_and_says_so(given):
    _, args, kwargs = given
    _, module = split(given, 3)
    with pytest.raises(RunError, match=r"3 micro-batches: call accumulate\(\)"):
        module(*args, **kwargs)


def test_a_batch_that_does_not_divide_is_refused(given):
    _, args, kwargs = given
    _, module = split(given, 3)
    odd = {"x": args[0]["x"][:, :10], "y": args[0]["y"][:10]}
    with pytest.raises(InputError, match="10 samples"):
        module.accumulate(odd, **kwargs)


def test_a_smaller_batch_is_cut_into_as_many(given):
    model, (whole,), kwargs = given
    _, module = split(given, 3)
    batch = {"x": whole["x"][:, :6], "y": whole["y"][:6]}
    expected = model(batch, **kwargs)
    expected.backward()
    loss = module.accumulate(batch, **kwargs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)


def test_a_compiled_module_is_refused(given):
    _, args, kwargs = given
    _, module = split(given, 3)
    module.compile(backend="eager")
    with pytest.raises(RunError, match="compiled module"):
        module.accumulate(*args, **kwargs)
