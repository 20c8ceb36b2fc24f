"""Weights for a model on the meta device, a module at a time.

A module's own initialisation is run on that module alone, from a seed of its own, so that every
rank draws the same numbers and never holds more than one module's weights whole.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.errors import RunError


def tensors_of(model: nn.Module, device: torch.device, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer by its first name, with data, a module's at a time."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        own = [
            (name, t)
            for name, t in (*module._parameters.items(), *module._buffers.items())
            if t is not None and id(t) not in seen
        ]
        seen.update(id(t) for _, t in own)
        made = _initialised(model, path, module, device, seed) if _on_meta(own) else module
        for name, _ in own:
            tensor = made._parameters.get(name)
            found = tensor if tensor is not None else made._buffers[name]
            assert found is not None
            yield f"{path}.{name}" if path else name, found.detach()


def _on_meta(own: list[tuple[str, Tensor]]) -> bool:
    return any(t.is_meta for _, t in own)


def _initialised(
    root: nn.Module, path: str, module: nn.Module, device: torch.device, seed: int
) -> nn.Module:
    """A copy of one module (without its children) with weights as it would draw them itself."""
    made = copy.copy(module)
    made._parameters = dict(module._parameters)
    made._buffers = dict(module._buffers)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(zlib.crc32(path.encode()) + seed)
        made.to_empty(device=device, recurse=False)
        _reset(root, path, made)
    return made


def _reset(root: nn.Module, path: str, made: Any) -> None:
    """The module's own `reset_parameters`, or its model's `_init_weights`."""
    for owner in [root.get_submodule(p) for p in _parents(path)]:
        if hasattr(owner, "_init_weights"):
            owner._init_weights(made)
            return
    if hasattr(made, "reset_parameters"):
        made.reset_parameters()
        return
    raise RunError(
        f"The module {path or '(model)'} ({type(made).__name__}) is on the meta device and has no "
        "reset_parameters() to draw its weights with. Add one, or build the model with real "
        "weights."
    )


def _parents(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return [".".join(parts[:k]) for k in range(len(parts), -1, -1)]
