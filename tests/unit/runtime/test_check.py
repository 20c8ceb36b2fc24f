"""`check` holds a plan against the model itself, random numbers included, and says what it saw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardfold.api import plan as find_plan
from shardfold.runtime import parallelize
from shardfold.runtime.check import Comparison, compare

WIDTH = 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Any:
        return self.b(self.between(self.a(x))).square().mean()


class Dropped(Model):
    def between(self, h: Tensor) -> Tensor:
        dropped = nn.functional.dropout(h, 0.3)
        images = nn.functional.dropout2d(dropped.view(4, WIDTH, 1, 1).expand(4, WIDTH, 2, 2), 0.4)
        heads = images.permute(0, 2, 3, 1).reshape(4, 2, 2, WIDTH)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2).mean(
            (1, 2)
        )


class Noisy(Model):
    """What VAEs, diffusion, Gumbel softmax and stochastic depth draw."""

    def between(self, h: Tensor) -> Tensor:
        h = h + torch.randn_like(h) * torch.rand(WIDTH, dtype=h.dtype)
        h = h * torch.bernoulli(torch.full((4, 1), 0.7, dtype=h.dtype))
        h = nn.functional.gumbel_softmax(h, tau=0.5)
        steps = torch.randint(0, 10, (4, 1))
        keep = h.new_empty(4, 1).bernoulli_(0.8).div_(0.8)
        return h * keep + steps * torch.empty_like(h).uniform_(-1, 1).normal_(0.0, 0.1)


class Scalar(Model):
    """Both a loss and what it was made of."""

    def forward(self, x: Tensor) -> Any:
        loss = super().forward(x)
        return {"loss": loss, "parts": [loss.detach()]}


def checked(model: nn.Module) -> Comparison:
    torch.manual_seed(1)
    x = torch.randn(4, WIDTH)
    return compare(model, find_plan(model, (x,), cluster="cpu"), (x,))


@pytest.mark.parametrize("model", [Dropped, Noisy, Scalar])
def test_a_model_that_draws_is_compared_with_itself(model: type[Model]) -> None:
    found = checked(model())
    assert found.is_equal, str(found)
    assert found.unlike == ""
    assert "as the model itself on one device" in str(found)


def test_a_plan_without_splits_says_that_nothing_was_split() -> None:
    found = checked(Model())
    assert (found.is_equal, found.split) == (True, 0)
    assert "The plan splits no operator" in str(found)


HIDDEN = type("Hidden", (), {"calls": 0})()


class Lost(Model):
    """Changes in a way that no look at the model shows."""

    def between(self, h: Tensor) -> Tensor:
        HIDDEN.calls += type(h) is Tensor  # however often it is traced before
        return h * (2 if HIDDEN.calls > 1 else 1)


def test_what_capture_lost_is_found_in_the_model_itself() -> None:
    HIDDEN.calls = 0
    found = checked(Lost())
    assert not found.is_equal
    assert "The captured program is not the model" in str(found)
    assert "the gradient of a.weight (read by linear, a (" in str(found).lower()


def test_a_model_that_cannot_be_run_is_told() -> None:
    class Insists(Model):
        def between(self, h: Tensor) -> Tensor:
            if h.dtype == torch.float64 and h.device.type == "cpu":
                raise TypeError("no doubles here")
            return h

    found = checked(Insists())
    assert found.is_equal
    assert "The model itself was not run (it does not run in float64: TypeError: no doubles" in str(
        found
    )


class Averaged(Model):
    """Batch norm by hand: statistics are updated in training, and used in evaluation."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.always = always
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def between(self, h: Tensor) -> Tensor:
        if self.training or self.always:
            with torch.no_grad():
                self.mean.lerp_(h.mean(0), 0.5)
                self.calls += 1
        return h


@pytest.mark.parametrize("always", [False, True])
def test_buffers_that_only_training_updates_stay_in_evaluation(always: bool) -> None:
    model, x = Averaged(always=always), torch.randn(4, WIDTH)
    parallel = parallelize(model, find_plan(model, (x,), cluster="cpu"), (x,))
    for training in (True, False, True):
        model.train(training)
        parallel.train(training)
        torch.testing.assert_close(parallel(x), model(x))
        torch.testing.assert_close(parallel.mean, model.mean)
        torch.testing.assert_close(parallel.calls, model.calls)
