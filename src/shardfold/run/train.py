"""A small trainer under a plan: the plan's optimizer, on the example batch repeated."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.errors import RunError
from shardfold.plans import Plan
from shardfold.run.parallelize import parallelize
from shardfold.spaces import Maker

UPDATES: Mapping[str, Callable[..., Any]] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step as it was: its number, the loss before it, and how long it took."""

    number: int
    loss: float
    seconds: float


def train(
    model: nn.Module,
    plan: Plan,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    steps: int,
    lr: float = 1e-3,
    rules: Mapping[str, Maker] | None = None,
    seed: int = 0,
    watch: Callable[[StepReport], None] = lambda report: None,
) -> list[StepReport]:
    """Take `steps` steps on the example batch with the plan's optimizer; on every rank."""
    given = dict(kwargs or {})
    check_data(args, given)
    module = parallelize(model, plan, args, given, rules=rules, seed=seed)
    optimizer = UPDATES[plan.provenance.optimizer](module.parameters(), lr=lr)
    reports = []
    for number in range(steps):
        started = time.perf_counter()
        loss = module(*args, **given)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        value = float(loss.detach())
        reports.append(StepReport(number, value, time.perf_counter() - started))
        watch(reports[-1])
    return reports


def check_data(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse an example batch without data."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_meta:
            raise RunError(
                "The example batch is on the meta device: return real tensors from the function, "
                "the model itself may stay on meta."
            )
