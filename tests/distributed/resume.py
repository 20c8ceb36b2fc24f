"""Training that is interrupted, and goes on under another plan: what the processes do."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardfold import zoo
from shardfold.plans.store import loads
from shardfold.run import parallelize
from shardfold.run.checkpoint import load, save

from .jobs import build


@dataclass(frozen=True)
class Case:
    """A model under a plan, the folder of its checkpoints, in which width it runs, and how."""

    model: str
    plan: bytes
    folder: Path
    double: bool = False
    lr: float = 1e-3
    batch: int | None = None


def tied(name: str, batch: int | None = None) -> tuple[Any, Any, Any]:
    """A small model whose first and last weight are one, where it has such."""
    model, args, kwargs = (
        build(name) if batch is None else zoo.build(name, device="cpu", batch=batch)
    )
    if name.startswith("rnnlm"):
        model.projection.weight = model.embedding.weight
    elif name.startswith("llama"):
        inner = next(m for m in model.modules() if hasattr(m, "lm_head"))
        inner.lm_head.weight = inner.model.embed_tokens.weight
    return model, args, kwargs


def whole_runs(rank: int, cases: Sequence[Case], steps: int) -> list[list[float]]:
    """The losses of 2 x `steps` steps; saved in the middle, and gone on with."""
    return [_run(case, 0, 2 * steps, save_at=steps) for case in cases]


def resumed_runs(rank: int, cases: Sequence[Case], steps: int) -> list[list[float]]:
    """The losses of the second half, from what was saved."""
    return [_run(case, steps, 2 * steps, save_at=None) for case in cases]


def _run(case: Case, first: int, last: int, save_at: int | None) -> list[float]:
    logging.getLogger("torch").setLevel(logging.ERROR)
    model, args, kwargs = tied(case.model, case.batch)
    if first:  # whatever the model began with, the checkpoint's weights count
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.mul_(2)
    module = parallelize(model, loads(case.plan), args, kwargs, double=case.double)
    optimizer = torch.optim.AdamW(module.parameters(), lr=case.lr)
    if first:
        found = load(module, optimizer, case.folder)
        assert (found.step, found.data) == (first, {"batch": first})
    losses = []
    for step in range(first, last):
        if step == save_at:
            save(module, optimizer, case.folder, step=step, data={"batch": step})
        loss = module(*args, **kwargs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
