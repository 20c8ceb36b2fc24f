"""Elastic training: save every so many steps, resume from the last checkpoint, end on SIGTERM.

Whoever starts the processes (torchrun's elastic agent) starts them again when one is lost, with
what is left. Each start takes up the last checkpoint, whatever plan and number of ranks wrote it.
SIGTERM is a request to save and end: all ranks agree on the step after which they do.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardfold.runtime.checkpoint import Checkpoint, load, save
from shardfold.runtime.checkpoint.folders import latest, on_first
from shardfold.runtime.training import State


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
