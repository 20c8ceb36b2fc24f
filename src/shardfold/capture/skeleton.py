"""A copy of a module whose parameters and buffers hold no data.

`copy.deepcopy` asks a memo before it copies an object. With every parameter and buffer already
in the memo as its meta-device twin, no weight is ever copied, and a tensor that was shared in
the original is shared in the copy.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
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


UNCHANGING = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, type)
EMPTY = (dict, list, set, OrderedDict)


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
        return _copied(model, memo).train()
    except (TypeError, RuntimeError) as error:
        raise ModelError(
            f"The model {type(model).__name__} cannot be copied without its weights ({error}). "
            "Build it under `with torch.device('meta'):` and without handles, locks or "
            "non-leaf tensors as attributes."
        ) from error


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """As `copy.deepcopy(model, memo)`, without asking it about every attribute of every layer.

    Modules are copied as their dictionaries say, unless one of them has its own way of being
    copied; attributes that cannot change are shared, and the others are left to deepcopy.
    """
    modules = list(model.modules())
    if any(_copies_itself(type(module)) for module in modules):
        return copy.deepcopy(model, memo)
    for module in modules:
        memo[id(module)] = object.__new__(type(module))
    for module in modules:
        twin = vars(memo[id(module)])
        for name, value in vars(module).items():
            if isinstance(value, dict) and name in ("_parameters", "_buffers", "_modules"):
                twin[name] = {k: None if v is None else memo[id(v)] for k, v in value.items()}
            elif isinstance(value, UNCHANGING):
                twin[name] = value
            elif not value and type(value) in EMPTY:
                twin[name] = type(value)()
            else:
                twin[name] = copy.deepcopy(value, memo)
    found: nn.Module = memo[id(model)]
    return found


def _copies_itself(kind: type[nn.Module]) -> bool:
    own = ("__deepcopy__", "__getstate__", "__reduce__", "__reduce_ex__")
    return kind.__setstate__ is not nn.Module.__setstate__ or any(
        getattr(kind, name, None) is not getattr(nn.Module, name, None) for name in own
    )


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
