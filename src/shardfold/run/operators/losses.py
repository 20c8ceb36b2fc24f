"""Losses: sums over this device's examples, divided by the count of all; classes in parts.

With the classes in parts, a row's loss is log(sum of exp) minus the picked logit. Its maximum is
all-reduced first, then the sum and the picked logit (and what weights and smoothing add) together;
backward needs nothing from the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from shardfold.run.groups import Axes
from shardfold.run.operators.site import Context, Local, Site, statistics_dtype, summed
from shardfold.spaces.rules.losses import MEAN, NONE, PICKED, POINTWISE

SUM = 2


def _rows(site: Site) -> list[str]:
    """The factors of the loss's rows, as the rule counts them."""
    rank = site.inputs[0].rank
    return [] if rank == 1 else ["b", *(f"i{k}" for k in range(2, rank))]


def _cross_entropy(site: Site) -> Local:
    target = site.position("target")
    assert target is not None
    if not site.is_split:
        return site.invoke
    if site.rule.rule.operands[target] == site.rule.rule.operands[0]:
        return _soft(site, target)
    weight = site.position("weight")
    smoothing = float(site.argument("label_smoothing", 0.0))
    reduction = site.argument("reduction", MEAN)
    ignored = int(site.argument("ignore_index", -100))
    classes = site.axes("c")
    if classes and (weight is not None or smoothing):
        raise site.unsupported("class weights and label smoothing need whole classes")
    low, high = site.part("c") if classes else (0, 0)

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        given, wanted = tensors[0], tensors[target]
        weights = None if weight is None else tensors[weight]
        if classes:
            part = (low, high, ignored)
            total = _SplitClasses.apply(given, wanted, part, classes, context)
        else:
            total = cross_entropy(
                given,
                wanted,
                weights,
                ignore_index=ignored,
                reduction="none",
                label_smoothing=smoothing,
            )
        if reduction == NONE:
            return total
        if reduction == SUM:
            return total.sum()
        return total.sum() / _count(site, wanted, weights, ignored, context).to(total.dtype)

    return call


def _count(
    site: Site, wanted: Tensor, weights: Tensor | None, ignored: int, context: Context
) -> Tensor:
    """How many rows of the whole batch count, or their weight."""
    kept = wanted != ignored
    if weights is None:
        own = kept.sum().to(torch.int32)
    else:
        own = weights.detach()[wanted.clamp(min=0)].mul(kept).sum()
    return summed(context, own, site, _rows(site))


class _SplitClasses(torch.autograd.Function):
    """The loss of each row, from a part of its logits; dim 1 (or the only dim) are the classes."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        part: tuple[int, int, int],
        axes: Axes,
        context: Context,
    ) -> Tensor:
        low, high, ignored = part
        dim = min(1, logits.dim() - 1)
        x = logits.to(statistics_dtype(logits.dtype))
        most = context.groups.all_reduce(x.amax(dim), axes, most=True)
        shifted = x - most.unsqueeze(dim)
        exp = shifted.exp()
        mine = (target >= low) & (target < high) & (target != ignored)
        local = (target - low).clamp(0, high - low - 1).unsqueeze(dim)
        picked = shifted.gather(dim, local).squeeze(dim).mul(mine)
        sums = context.groups.all_reduce(torch.stack([exp.sum(dim), picked]), axes)
        kept = target != ignored
        ctx.save_for_backward(exp, sums[0], local, mine, kept)
        ctx.dim, ctx.dtype = dim, logits.dtype
        return (sums[0].log() - sums[1]).mul(kept).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        exp, total, local, mine, kept = ctx.saved_tensors
        found = exp / total.unsqueeze(ctx.dim)
        found.scatter_add_(ctx.dim, local, -mine.to(found.dtype).unsqueeze(ctx.dim))
        found.mul_((gradient * kept).to(found.dtype).unsqueeze(ctx.dim))
        return found.to(ctx.dtype), None, None, None, None


def _soft(site: Site, target: int) -> Local:
    """Targets that are probabilities: a mean divides by the number of rows."""
    if site.axes("c"):
        raise site.unsupported("probabilities as targets need whole classes")
    return _divided(site, math.prod(site.size(f) for f in _rows(site)))


def _pointwise(site: Site) -> Local:
    return _divided(site, math.prod(site.rule.rule.sizes.values()))


def _divided(site: Site, count: int) -> Local:
    """A mean as a sum divided by a count that is known."""
    if not site.is_split or site.argument("reduction", MEAN) != MEAN:
        return site.invoke

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        return site.invoke(tensors, context, reduction=SUM) / count

    return call


def _picked(site: Site) -> Local:
    """Negative log-likelihood: means divide by the count of the whole batch."""
    if not site.is_split:
        return site.invoke
    target, weight = site.position("target"), site.position("weight")
    if site.axes("c") or len(site.results) > 1 or target is None:
        raise site.unsupported("classes in parts")
    reduction, ignored = site.argument("reduction", MEAN), int(site.argument("ignore_index", -100))
    if reduction != MEAN:
        return site.invoke

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        weights = None if weight is None else tensors[weight]
        total = site.invoke(tensors, context, reduction=SUM)
        return total / _count(site, tensors[target], weights, ignored, context).to(total.dtype)

    return call


TABLE: Mapping[str, Callable[[Site], Local]] = {
    "aten.cross_entropy_loss": _cross_entropy,
    **{f"aten.{name}": _picked for name in PICKED},
    **{f"aten.{name}": _pointwise for name in POINTWISE},
}
