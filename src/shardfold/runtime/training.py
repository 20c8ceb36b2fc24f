"""Training under a plan: the loop, its data, and elastic resume.

All that changes is one `State`, and a step takes it forward. The data is a function from a step's
number to its batch, so that a run that was interrupted goes on with the batch it would have had.
Whoever keeps checkpoints saves the state in `after`, and hands `train` one that has taken some
steps already.

The data is the example batch again and again, or the bytes of a text file. The bytes of a file are
its tokens. Every sample of every step is a piece of the text whose place depends on the seed and
the number of the step alone: all ranks draw the same batch, and a run that was interrupted goes on
with the batch it would have had.

An elastic run saves every so many steps and resumes from the last checkpoint. Whoever starts the
processes (torchrun's elastic agent) starts them again when one is lost, with what is left. Each
start takes up the last checkpoint, whatever plan and number of ranks wrote it. SIGTERM is a request
to save and end: all ranks agree on the step after which they do.
"""

from __future__ import annotations

import inspect
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfold.cluster import from_plain
from shardfold.costs.operator_steps import ideal_seconds, model_flops
from shardfold.errors import InputError, RunError
from shardfold.graph import Graph
from shardfold.operators import Rules, rules_of
from shardfold.plans import Plan
from shardfold.runtime.checkpoint import Checkpoint, load, save
from shardfold.runtime.checkpoint.folders import latest, on_first
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
        state.module.clip_grad_norm_(clip)
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
    devices = plan.processes
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


BYTES = 256
IGNORED = -100  # the label that cross-entropy skips
SHIFTED_INSIDE = "input_ids"  # transformers: the model itself compares with the next token


def repeated(example: Batch) -> Data:
    """The example, in every step."""
    return lambda step: example


def text(path: str | Path, model: nn.Module, example: Batch, seed: int = 0) -> Data:
    """Pieces of a text file, as a model of tokens takes them."""
    roles = _Roles.of(model, example)
    try:
        data = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise InputError(f"Cannot read the text {path}: {error.strerror}.") from error
    if len(data) <= roles.length:
        raise RunError(
            f"The text {path} has {len(data)} bytes, a sample of this model needs "
            f"{roles.length + 1}. Give a longer text, or a smaller --seq."
        )
    known = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    if max(known, default=0) < BYTES:
        raise RunError(
            f"The model's vocabulary has {max(known, default=0)} tokens; the bytes of a text need "
            f"{BYTES}."
        )

    def batch(step: int) -> Batch:
        starts = np.random.default_rng((seed, step)).integers(
            len(data) - roles.length, size=roles.samples
        )
        rows = data[starts[:, None] + np.arange(roles.length + 1)]
        return roles.filled(torch.from_numpy(rows.astype(np.int64)))

    return batch


@dataclass(frozen=True, slots=True)
class _Roles:
    """Which inputs are tokens, and which are the labels; everything else stays as it is."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...]  # of the tokens, in order; the decoder's come second
    samples: int
    seq: int

    @classmethod
    def of(cls, model: nn.Module, example: Batch) -> _Roles:
        args, kwargs = example
        named = {**dict(zip(_parameters(model), args, strict=False)), **kwargs}
        whole = {n: v for n, v in named.items() if isinstance(v, Tensor) and v.dim() == 2}
        tokens = tuple(n for n, v in whole.items() if n != "labels" and not v.is_floating_point())
        labels = whole.get("labels")
        shapes = {tuple(whole[n].shape) for n in (*tokens, "labels") if n in whole}
        if labels is None or not 1 <= len(tokens) <= 2 or len(shapes) != 1:
            raise RunError(
                f"Text is for models of tokens and labels; this one takes {', '.join(named)}. "
                "Leave --data out to train on the example batch."
            )
        return cls(args, dict(kwargs), tokens, *labels.shape)

    @property
    def length(self) -> int:
        """Tokens of the text that a sample needs, less the one that is predicted last."""
        return self.seq * len(self.names)

    def filled(self, rows: Tensor) -> Batch:
        """The batch with these pieces of text in it."""
        first = len(self.names) - 1
        pieces = {n: rows[:, k * self.seq :][:, : self.seq] for k, n in enumerate(self.names)}
        old = self.kwargs.get("labels")
        if isinstance(old, Tensor) and bool((old == IGNORED).any()):
            hidden = old != IGNORED  # a masked model: what is asked for is not shown
            pieces["labels"] = pieces[self.names[0]].masked_fill(~hidden, IGNORED)
            pieces[self.names[0]] = pieces[self.names[0]].masked_fill(hidden, 0)
        elif self.names == (SHIFTED_INSIDE,):
            pieces["labels"] = pieces[SHIFTED_INSIDE]
        else:
            pieces["labels"] = rows[:, first * self.seq + 1 :][:, : self.seq]
        positional = iter(n for n in pieces if n not in self.kwargs)
        args = tuple(
            pieces[next(positional)] if _is_tokens(value, self.samples, self.seq) else value
            for value in self.args
        )
        return args, {**self.kwargs, **{n: v for n, v in pieces.items() if n in self.kwargs}}


def _is_tokens(value: Any, samples: int, seq: int) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == (samples, seq)


def _parameters(model: nn.Module) -> list[str]:
    return [
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]


@dataclass(frozen=True, slots=True)
class Saving:
    """Where checkpoints go, how often one is made, and how many are kept."""

    folder: Path
    every: int = 100
    keep: int = 3


class Stopped(Exception):  # noqa: N818 - it is no error
    """Training was asked to end, and is saved."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path
        super().__init__(f"Stopped after step {step}, saved as {path}: start it again to go on.")


@dataclass(slots=True)
class Request:
    """Whether this process was asked to end."""

    asked: bool = field(default=False)


@contextmanager
def listening() -> Iterator[Request]:
    """While it lasts, SIGTERM is a request to save and end."""
    request = Request()

    def hear(number: int, frame: Any) -> None:
        request.asked = True

    before = signal.signal(signal.SIGTERM, hear)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, before)


def resume(state: State, saving: Saving) -> Checkpoint | None:
    """Take up the last checkpoint, if there is one; on every rank."""
    if not on_first(lambda: latest(saving.folder) is not None):
        return None
    found = load(state.module, state.optimizer, saving.folder)
    state.step = found.step
    state.schedule.load_state_dict(found.extra["schedule"])
    return found


def saver(saving: Saving, request: Request, last: int) -> Callable[[State], None]:
    """What to do after every step: save when it is time or the `last`, end when any was asked."""

    def after(state: State) -> None:
        stop = _any_rank(request.asked)
        if stop or state.step % saving.every == 0 or state.step == last:
            path = keep(state, saving)
            if stop and state.step < last:
                raise Stopped(state.step, path)

    return after


def keep(state: State, saving: Saving) -> Path:
    """Save the state; the data's position is the number of steps taken."""
    schedule = {k: v for k, v in state.schedule.state_dict().items() if k != "lr_lambdas"}
    return save(
        state.module,
        state.optimizer,
        saving.folder,
        step=state.step,
        data={"step": state.step},
        extra={"schedule": {**schedule, "lr_lambdas": [None]}},
        keep=saving.keep,
    )


def _any_rank(asked: bool) -> bool:
    if not (dist.is_available() and dist.is_initialized()):
        return asked
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    flag = torch.tensor(int(asked), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())
