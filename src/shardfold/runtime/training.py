"""A small trainer under a plan: all that changes is one `State`, and a step takes it forward.

The data is a function from a step's number to its batch, so that a run that was interrupted goes
on with the batch it would have had. Whoever keeps checkpoints saves the state in `after`, and
hands `train` one that has taken some steps already.

A run in figures: how the loss went, how long a step took, and how well the devices were used.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.cluster import from_plain
from shardfold.costs.operator_steps import ideal_seconds, model_flops
from shardfold.errors import RunError
from shardfold.graph import Graph
from shardfold.operators import Rules, rules_of
from shardfold.plans import Plan
from shardfold.runtime.module import Parallel
from shardfold.runtime.parallelize import parallelize
from shardfold.sharding import find_subdims

Batch = tuple[tuple[Any, ...], Mapping[str, Any]]
Data = Callable[[int], Batch]  # the whole batch of a step

UPDATES: Mapping[str, Callable[..., Any]] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train: the learning rate and its warm-up, where to clip, and the seed."""

    lr: float = 1e-3
    warmup: int = 0  # steps in which the learning rate grows to `lr`
    clip: float | None = None  # the largest norm of all gradients together
    seed: int = 0  # of dropout, and of weights that a meta-device model draws


@dataclass(slots=True)
class State:
    """All that changes while training: what a checkpoint holds."""

    module: Parallel
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    step: int = 0  # steps taken


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step as it was: its number, the loss before it, and how long it took."""

    number: int
    loss: float
    seconds: float


def begin(
    model: nn.Module,
    plan: Plan,
    example: Batch,
    recipe: Recipe,
    rules: Rules | None = None,
) -> State:
    """The state before the first step, with the plan's optimizer; on every rank."""
    args, kwargs = example
    check_data(args, kwargs)
    module = parallelize(model, plan, args, kwargs, rules=rules, seed=recipe.seed)
    optimizer = UPDATES[plan.provenance.request.optimizer](module.parameters(), lr=recipe.lr)

    def share(step: int) -> float:
        return min(1.0, (step + 1) / (recipe.warmup + 1))

    return State(module, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share))


def advance(state: State, batch: Batch, clip: float | None = None) -> float:
    """Take one step; the loss before it."""
    args, kwargs = batch
    loss = state.module.accumulate(*args, **kwargs)
    if clip is not None:
        nn.utils.clip_grad_norm_(state.module.parameters(), clip)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)  # forward needs the memory, not the gradients
    state.schedule.step()
    state.step += 1
    return float(loss)


def train(
    state: State,
    data: Data,
    *,
    steps: int,
    clip: float | None = None,
    watch: Callable[[StepReport], None] = lambda report: None,
    after: Callable[[State], None] = lambda state: None,
) -> list[StepReport]:
    """Train until `steps` steps have been taken in all; on every rank.

    `watch` is told of every step, `after` is given the state when a step is done.
    """
    reports = []
    while state.step < steps:
        started = time.perf_counter()
        number = state.step
        loss = advance(state, data(number), clip)
        reports.append(StepReport(number, loss, time.perf_counter() - started))
        watch(reports[-1])
        after(state)
    return reports


def check_data(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse an example batch without data."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_meta:
            raise RunError(
                "The example batch is on the meta device: return real tensors from the function, "
                "the model itself may stay on meta."
            )


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run came to; `mfu` is the share of all devices' peak that the model's work takes."""

    steps: int
    first_loss: float
    last_loss: float
    step_seconds: float  # the median, without the first
    samples_per_second: float
    tokens_per_second: float | None
    model_flops: float
    mfu: float
    devices: int

    def __str__(self) -> str:
        rate = f"{self.samples_per_second:,.0f} samples/s"
        if self.tokens_per_second is not None:
            rate = f"{self.tokens_per_second:,.0f} tokens/s"
        return (
            f"{self.steps} steps: loss {self.first_loss:.4f} -> {self.last_loss:.4f}, "
            f"{self.step_seconds * 1e3:.1f} ms a step (median), {rate}, MFU {self.mfu:.1%}"
        )


def figures(plan: Plan, graph: Graph, reports: Sequence[StepReport], example: Batch) -> Figures:
    """The figures of some steps: the graph's own work, against the peak of the plan's device."""
    seconds = statistics.median([r.seconds for r in reports[1:] or reports])
    devices = math.prod(axis.size for axis in plan.mesh)
    subdims = find_subdims(graph, rules_of(graph))
    ideal = ideal_seconds(graph, subdims, from_plain(dict(plan.provenance.cluster)).device)
    samples, tokens = _sizes([*example[0], *example[1].values()])
    return Figures(
        steps=len(reports),
        first_loss=reports[0].loss,
        last_loss=reports[-1].loss,
        step_seconds=seconds,
        samples_per_second=samples / seconds,
        tokens_per_second=None if tokens is None else tokens / seconds,
        model_flops=model_flops(graph, subdims) * plan.micro_batches,
        mfu=plan.micro_batches * ideal / (devices * seconds),
        devices=devices,
    )


def _sizes(values: Sequence[Any]) -> tuple[int, int | None]:
    """Samples in the batch, and tokens where the first tensor holds whole numbers."""
    first = next((v for v in values if isinstance(v, Tensor) and v.dim()), None)
    if first is None:
        return 1, None
    return int(first.shape[0]), None if first.is_floating_point() else first.numel()
