"""Dropout by global position: of elements, of channels, and of attention weights.

A byte an element is kept for backward. On a GPU one kernel draws, compares and scales, and backward
is one more pass; elsewhere operators of torch do, with the same mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfold.runtime.ops.counter_rng import (
    Dims,
    keep_mask,
    kernels_for,
    key_of,
    pieces_of,
    runs,
    threshold_of,
)
from shardfold.runtime.ops.local_op import HALVES, Context, Local, Site

ONE_PASS = (torch.float32, *HALVES)  # what the kernel multiplies, in float32
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
        found = _in_one_pass(x, pieces, p, context, operator)
        if found is None:
            kept = keep_mask(pieces, p, context, operator)
            found = (x * kept).mul_(1 / (1 - p)), kept
        ctx.save_for_backward(found[1])
        ctx.scale = 1 / (1 - p)
        return found[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (kept,) = ctx.saved_tensors
        found = torch.ops.aten.native_dropout_backward(gradient, kept, ctx.scale)
        return found, None, None, None, None


def _in_one_pass(
    x: Tensor, pieces: Dims, p: float, context: Context, operator: int
) -> tuple[Tensor, Tensor] | None:
    """The result and what was kept, where there is a kernel."""
    kernels = kernels_for(context)
    if kernels is None or x.dtype not in ONE_PASS:
        return None
    order = _order_of(x)
    x = x.contiguous() if order is None else x
    part = runs(pieces, order)
    if len(part[1]) > kernels.MOST:
        return None
    key = key_of(context, operator)
    y, kept = kernels.dropout(x, part, key, threshold_of(p), 1 / (1 - p))
    if context.drawn is not None:
        context.drawn.append(kept)
    return y, kept


def dropped(x: Tensor, pieces: Dims, p: float, context: Context, operator: int) -> Tensor:
    """A tensor, or attention weights, after dropout."""
    if p == 1:
        return x * 0
    if context.traced or not x.is_floating_point():
        kept = keep_mask(pieces, p, context, operator)
        return x * kept.to(x.dtype).div_(1 - p)
    found: Tensor = _Dropped.apply(x, pieces, p, context, operator)
    return found


def _order_of(x: Tensor) -> list[int] | None:
    """The dims as they lie in memory, major first; None if there are gaps between elements."""
    steps = x.stride()
    order = sorted(range(x.dim()), key=lambda dim: (-steps[dim], dim))
    expected = 1
    for dim in reversed([dim for dim in order if x.shape[dim] > 1]):
        if steps[dim] != expected:
            return None
        expected *= x.shape[dim]
    return order


DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
TABLE: Mapping[str, Callable[[Site], Local]] = {f"aten.{name}": _dropout for name in DROPOUTS}
