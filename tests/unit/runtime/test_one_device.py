"""On one device the parallel module is the model: same loss, gradients, buffers and names."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardfold import zoo
from shardfold.api import plan as find_plan
from shardfold.errors import ClusterError, RunError
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


class Scaled(nn.Module):
    """Positions by length, a part that is normed, and a number that Python has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.inner.scale = 2.0
        self.norm, self.alpha = nn.BatchNorm1d(4), 3.0
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x) * self.inner.scale + self.shift
        places = torch.arange(x.shape[1], dtype=x.dtype)
        h = self.norm(h.flatten(0, 1)).view_as(h)
        return (h.mean(-1) * places).square().mean() * self.alpha


def scaled(most_shapes: int, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, Any]:
    monkeypatch.setattr("shardfold.runtime.module.MOST_SHAPES", most_shapes)
    torch.manual_seed(0)
    model = Scaled().double()
    x = torch.randn(6, 3, 4).double()
    return model, parallelize(model, find_plan(model, (x,), cluster="cpu"), (x,))


def test_batches_of_other_shapes_are_captured_again_and_some_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, parallel = scaled(2, monkeypatch)
    for step, shape in enumerate([(6, 3), (5, 3), (1, 7), (6, 3), (5, 3), (8, 2), (1, 7)]):
        x = torch.randn(*shape, 4).double()
        with pytest.warns(UserWarning, match="more than 2 shapes") if step > 4 else nullcontext():
            found = parallel(x)
        expected = model(x)
        found.backward()
        expected.backward()
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        with torch.no_grad():
            torch.testing.assert_close(parallel.eval()(x), model.eval()(x), rtol=1e-12, atol=0)
        with parallel.train().outputs("norm") as wanted:
            parallel(x)
        model.train()(x)
        assert wanted["norm"].shape == (shape[0] * shape[1], 4)
    assert list(parallel._run.others) == [((8, 2, 4),), ((1, 7, 4),)]
    for (name, p), q in zip(model.named_parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-9, atol=1e-12, msg=name)
    for (name, b), c in zip(model.named_buffers(), parallel.buffers(), strict=True):
        torch.testing.assert_close(c, b, rtol=1e-9, atol=1e-12, msg=name)


def test_a_batch_that_the_model_does_not_take_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, parallel = scaled(2, monkeypatch)
    with pytest.raises(RunError, match=r"A batch of 6x3x5 does not run under the plan for 6x3x4"):
        parallel(torch.randn(6, 3, 5).double())


def test_what_forward_read_in_python_cannot_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    _, parallel = scaled(2, monkeypatch)
    for owner, name in ((parallel, "alpha"), (parallel.inner, "scale"), (parallel.norm, "eps")):
        with pytest.raises(RunError, match=f"'{name}' of the model .* make it a buffer"):
            setattr(owner, name, 0.1)
    x = torch.randn(6, 3, 4).double()
    before = parallel(x)
    parallel.shift = torch.zeros(4).double()
    parallel.note = "of the user's own"
    assert parallel(x) != before
    twin = copy.deepcopy(parallel)
    with pytest.raises(RunError, match="'alpha' of the model"):
        twin.alpha = 0.1


def test_a_plan_in_float8_is_priced_and_not_run() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16)), torch.ones(32, 64)
    loss = nn.Sequential(model, nn.LogSoftmax(-1), nn.Flatten(0))
    given = {"loss": torch.mean, "precision": "fp8-mixed"}
    with pytest.raises(ClusterError, match=r"A100.* no peak rate for 'float8'; it has float64"):
        find_plan(loss, (x,), cluster="1xa100", **given)
    plan = find_plan(loss, (x,), cluster="1xh100", **given)
    assert "layers multiply in float8 (priced, neither run" in " ".join(str(plan).split())
    with pytest.raises(RunError, match=r"fp8-mixed.* plan with precision='bf16-mixed' to train"):
        parallelize(loss, plan, (x,), loss=torch.mean)
