"""Sums inside an operator whose result is whole on every device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardfold.run.groups import Axes
from shardfold.run.operators.site import Context


class WholeSum(torch.autograd.Function):
    """An all-reduce whose result, and so whose gradient, is whole on every device."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, axes: Axes, context: Context) -> Tensor:
        """Add up the parts."""
        return context.groups.all_reduce(parts.clone(), axes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Every part gets the whole gradient, which every device has."""
        return gradient, None, None
