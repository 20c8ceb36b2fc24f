"""On one device the parallel module is the model: same loss, gradients, buffers and names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardfold import zoo
from shardfold.api import plan as find_plan
from shardfold.runtime import parallelize

MODELS = ("alexnet-tiny", "llama3-8b-tiny", "mixtral-8x7b-tiny", "resnet50-tiny", "rnnlm-tiny")


def loss_of(model: nn.Module, args: Any, kwargs: Any) -> Tensor:
    found = model(*args, **kwargs)
    return found if isinstance(found, Tensor) else found.loss


@pytest.mark.parametrize("name", MODELS)
def test_loss_gradients_and_buffers_are_those_of_the_module(name: str) -> None:
    model, args, kwargs = zoo.build(name, device="cpu", dtype="fp64")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    parallel = parallelize(model, find_plan(model, args, kwargs, cluster="cpu"), args, kwargs)
    found, expected = parallel(*args, **kwargs), loss_of(model, args, kwargs)
    found.backward()
    expected.backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert [n for n, _ in parallel.named_parameters()] == list(gradients)
    for key, parameter in parallel.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-9, atol=1e-15)
    state, original = parallel.state_dict(), model.state_dict()
    assert list(state) == list(original)
    for key, value in original.items():
        torch.testing.assert_close(state[key], value, rtol=1e-12, atol=1e-15)


def test_a_region_without_gradients_has_none() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([3.0]))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = self.weight * x
            return (self.weight * scale).sum()

    model, x = Model(), torch.tensor([2.0])
    parallel = parallelize(model, find_plan(model, (x,), cluster="cpu"), (x,))
    parallel(x).backward()
    assert parallel.weight.grad.tolist() == [6.0]


def test_a_loss_of_the_users_own() -> None:
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    given = {"loss": lambda y: y.square().mean()}
    plan = find_plan(model, (x,), cluster="cpu", **given)
    parallel = parallelize(model, plan, (x,), **given)
    torch.testing.assert_close(parallel(x), model(x).square().mean())
    assert list(parallel.state_dict()) == ["weight", "bias"]
