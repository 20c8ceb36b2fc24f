"""A copy of a module whose parameters and buffers hold no data.

`copy.deepcopy` asks a memo before it copies an object. With every parameter and buffer already
in the memo as its meta-device twin, no weight is ever copied, and a tensor that was shared in
the original is shared in the copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardfold.errors import ModelError

DTYPES = {
    "fp64": torch.float64,
    "float64": torch.float64,
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


class WithLoss(nn.Module):
    """A model followed by a function that turns its output into a loss."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of the model's output."""
        return self.loss(self.model(*args, **kwargs))


def skeleton(model: nn.Module, dtype: str | None) -> nn.Module:
    """A copy of `model` on the meta device, in training mode, floating tensors in `dtype`."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"A model must be a torch.nn.Module, got {type(model).__name__}.")
    target = _torch_dtype(dtype)
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    memo: dict[int, Any] = {key: _twin(tensor, target) for key, tensor in tensors.items()}
    try:
        return copy.deepcopy(model, memo).train()
    except (TypeError, RuntimeError) as error:
        raise ModelError(
            f"The model {type(model).__name__} cannot be copied without its weights ({error}). "
            "Build it under `with torch.device('meta'):` and without handles, locks or "
            "non-leaf tensors as attributes."
        ) from error


def on_meta(tree: Any, dtype: str | None) -> Any:
    """The same nested arguments with every tensor on the meta device."""
    target = _torch_dtype(dtype)
    return pytree.tree_map_only(torch.Tensor, lambda tensor: _twin(tensor, target), tree)


def _twin(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    kept = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
    empty = torch.empty_like(tensor, device="meta", dtype=kept)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _torch_dtype(dtype: str | None) -> torch.dtype | None:
    if dtype is None:
        return None
    if dtype not in DTYPES:
        raise ModelError(f"Unknown dtype {dtype!r}. Known: {', '.join(DTYPES)}.")
    return DTYPES[dtype]
