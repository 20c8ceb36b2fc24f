"""Dropout by global position: of elements, of channels, and of attention weights.

A byte an element is kept for backward, which is one pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfold.runtime.ops.counter_rng import Dims, keep_mask, pieces_of
from shardfold.runtime.ops.local_op import Context, Local, Site

SATURATED = 1.7580993408473766  # where a SELU saturates, without its sign


def _dropout(site: Site) -> Local:
    p, train = float(site.argument("p")), bool(site.argument("train", True))
    if not train or not p:
        return lambda tensors, context: tensors[0]
    pieces = pieces_of(site.results[0])
    is_alpha, by_channel = "alpha" in site.op.kind, "feature" in site.op.kind
    if by_channel:  # a channel of an example is dropped as a whole
        pieces = [*pieces[:2], *([] for _ in pieces[2:])]

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        x = tensors[0]
        if p == 1.0:
            return x * 0
        if not (is_alpha or by_channel):
            return dropped(x, pieces, p, context, site.number)
        kept = keep_mask(pieces, p, context, site.number).to(x.dtype)
        return _alpha(x, kept, p) if is_alpha else x * kept.div_(1 - p)

    return call


def _alpha(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """What is dropped takes the value where a SELU saturates, mean and variance stay."""
    scale = 1 / math.sqrt((SATURATED**2 * p + 1) * (1 - p))
    return x * (kept * scale) + (kept - 1 + p) * (SATURATED * scale)


class _Dropped(torch.autograd.Function):
    """Dropout of which a byte an element is kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, pieces: Dims, p: float, context: Context, operator: int
    ) -> Tensor:
        kept = keep_mask(pieces, p, context, operator)
        ctx.save_for_backward(kept)
        ctx.scale = 1 / (1 - p)
        return (x * kept).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (kept,) = ctx.saved_tensors
        found = torch.ops.aten.native_dropout_backward(gradient, kept, ctx.scale)
        return found, None, None, None, None


def dropped(x: Tensor, pieces: Dims, p: float, context: Context, operator: int) -> Tensor:
    """A tensor, or attention weights, after dropout."""
    if p == 1:
        return x * 0
    if context.traced or not x.is_floating_point():
        kept = keep_mask(pieces, p, context, operator)
        return x * kept.to(x.dtype).div_(1 - p)
    found: Tensor = _Dropped.apply(x, pieces, p, context, operator)
    return found


DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
TABLE: Mapping[str, Callable[[Site], Local]] = {f"aten.{name}": _dropout for name in DROPOUTS}
