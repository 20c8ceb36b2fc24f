"""Backward functions of users, for random modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Straight(torch.autograd.Function):
    """Rounds, and lets the gradient through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient


class Both(torch.autograd.Function):
    """Two operands, two results, and a gradient that is not that of the results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, product: Tensor, total: Tensor) -> Any:  # type: ignore[override]
        x, y = ctx.saved_tensors
        return product * y.tanh(), total + product * x


class Scaled(torch.autograd.Function):
    """Scaled by a tensor that has no gradient."""

    @staticmethod
    def forward(x: Tensor, by: Tensor) -> Tensor:
        return x * by

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.saved_tensors[0] * 2, None
