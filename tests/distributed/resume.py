"""Training that is interrupted, and goes on under another plan: what the processes do."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardfold.plans.files import loads
from shardfold.runtime import parallelize
from shardfold.runtime.checkpoint import load, save

from .jobs import build


@dataclass(frozen=True)
class Case:
    """A model under a plan, the folder of its checkpoints, in which width it runs."""

    model: str
    plan: bytes
    folder: Path
    float64: bool = False
    shaken: bool = False  # every third weight is changed by its last bit, when it is resumed


def tied(name: str) -> tuple[Any, Any, Any]:
    """A small model whose first and last weight are one, where it has such."""
    model, args, kwargs = build(name)
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
    model, args, kwargs = tied(case.model)
    if first:  # whatever the model began with, the checkpoint's weights count
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.mul_(2)
    module = parallelize(model, loads(case.plan), args, kwargs, float64=case.float64)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    if first:
        found = load(module, optimizer, case.folder)
        assert (found.step, found.data) == (first, {"batch": first})
        if case.shaken:
            _shake(module)
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


@torch.no_grad()
def _shake(module: torch.nn.Module) -> None:
    """Change the last bit, of float32, of about a third of the weights; on one device."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        chosen = torch.rand(parameter.shape, generator=generator) < 1 / 3
        narrow = parameter.float()
        moved = torch.nextafter(narrow, torch.full_like(narrow, torch.inf)) - narrow
        parameter.add_(torch.where(chosen, moved, 0.0).to(parameter.dtype))
