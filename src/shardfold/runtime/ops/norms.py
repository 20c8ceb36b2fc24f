"""Normalisations and softmax whose statistics are reduced over the devices that share a row.

Forward and backward each all-reduce a few sums a row (or channel); these are the rule's exchanges.
With g = dy * w and x^ the normalised input, dx = r (g - mean(g) - x^ mean(g x^)).

A variance from two sums, mean(x^2) - mean(x)^2, loses digits where the mean is larger than the
deviations. So each device sums the deviations from its own mean m, and sends n m and
sum((x - m)^2) + n m^2 in float64, which has digits to spare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfold.runtime.ops.local_op import (
    Context,
    Local,
    Site,
    as_autocast,
    statistics_dtype,
    summed,
)


class _Normalise(torch.autograd.Function):
    """Normalise over `dims`, of which other devices have parts; also gives mean and variance."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dims: list[int],
        count: int,
        eps: float,
        centred: bool,
        reduce: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = x.to(statistics_dtype(x.dtype))
        if centred:
            normal, mean, variance = _centred(wide, dims, count, reduce)
            scale = (variance + eps).rsqrt().to(wide.dtype)
            normal *= scale
        else:
            mean = variance = reduce(wide.square().sum(dims, keepdim=True)) / count
            scale = (variance + eps).rsqrt()
            normal = wide * scale
        ctx.save_for_backward(normal, scale)
        ctx.dims, ctx.count, ctx.centred, ctx.reduce = dims, count, centred, reduce
        ctx.mark_non_differentiable(mean, variance)
        return normal.to(x.dtype), mean, variance

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
        normal, scale = ctx.saved_tensors
        g = gradient.to(normal.dtype)
        along = (g * normal).sum(ctx.dims, keepdim=True)
        if ctx.centred:
            sums = ctx.reduce(torch.stack([g.sum(ctx.dims, keepdim=True), along])) / ctx.count
            found = scale * (g - sums[0] - normal * sums[1])
        else:
            found = scale * (g - normal * (ctx.reduce(along) / ctx.count))
        return found.to(gradient.dtype), None, None, None, None, None


def _centred(
    wide: Tensor, dims: list[int], count: int, reduce: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The deviations from the mean of all, that mean, and the variance; the latter in float64."""
    here = math.prod(wide.shape[d] for d in dims)
    own = wide.sum(dims, keepdim=True) / max(here, 1)
    apart = wide - own
    spread = apart.square().sum(dims, keepdim=True)
    mean, variance = moments(own, spread, here, count, reduce)
    apart += (own - mean).to(wide.dtype)
    return apart, mean, variance


def moments(
    own: Tensor, spread: Tensor, here: int, count: int, reduce: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Mean and variance of all in float64, from each device's mean and sum of deviations."""
    exact = own.to(torch.float64)
    sums = torch.stack([here * exact, spread.to(torch.float64) + here * exact.square()])
    mean, square = pooled(sums, reduce) / count
    return mean, (square - mean.square()).clamp_(min=0)


def pooled(sums: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """The sums over all devices, of what is in float64 whatever is normalised."""
    return reduce(sums)


def reducer(site: Site, context: Context, factors: Sequence[str]) -> Callable[[Tensor], Tensor]:
    """A sum over the devices that share these factors."""
    return lambda tensor: summed(context, tensor, site, factors)


def _layer_norm(site: Site) -> Local:
    count = len(site.argument("normalized_shape"))
    factors = [f"d{k}" for k in range(count)]
    if not site.axes(*factors):
        return site.invoke
    if len(site.results) > 1:
        raise site.unsupported("the statistics are results of their own")
    dims = list(range(-count, 0))
    points = math.prod(site.inputs[0].whole[-count:])
    centred = site.op.kind == "aten.layer_norm"
    weight, bias = site.position("weight"), site.position("bias")
    eps = site.argument("eps")

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        x = tensors[0]
        small = torch.finfo(x.dtype).eps if eps is None else eps
        reduce = reducer(site, context, factors)
        y, _, _ = _Normalise.apply(x, dims, points, small, centred, reduce)
        y = y if weight is None else y * tensors[weight]
        return y if bias is None else y + tensors[bias]

    return call


def _group_norm(site: Site) -> Local:
    groups = site.points("g") if site.axes("g") else site.argument("num_groups")
    return lambda tensors, context: site.invoke(tensors, context, num_groups=groups)


class _Softmax(torch.autograd.Function):
    """Softmax (or its logarithm) over `dim`, of which other devices have parts."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, axes: tuple[int, ...], log: bool, context: Context
    ) -> Tensor:
        wide = x.to(statistics_dtype(x.dtype))
        most = context.groups.all_reduce(wide.amax(dim, keepdim=True), axes, most=True)
        exp = (wide - most).exp_()
        total = context.groups.all_reduce(exp.sum(dim, keepdim=True), axes)
        share = exp / total
        ctx.save_for_backward(share)
        ctx.dim, ctx.axes, ctx.log, ctx.context = dim, axes, log, context
        return (wide - most - total.log() if log else share).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (share,) = ctx.saved_tensors
        g = gradient.to(share.dtype)
        along = (g if ctx.log else g * share).sum(ctx.dim, keepdim=True)
        along = ctx.context.groups.all_reduce(along, ctx.axes)
        found = g - share * along if ctx.log else share * (g - along)
        return found.to(gradient.dtype), None, None, None, None


def _softmax(site: Site) -> Local:
    rank = site.inputs[0].rank
    dim = site.argument("dim") % rank if rank else 0
    axes = site.axes(f"i{dim}")
    if not axes:
        return site.invoke
    if site.op.kind == "aten._safe_softmax":
        raise site.unsupported("rows without any finite value need the whole row")
    log = "log" in site.op.kind
    dtype = site.argument("dtype")

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        x = tensors[0] if dtype is None or context.double else tensors[0].to(dtype)
        return _Softmax.apply(as_autocast(x), dim, axes, log, context)

    return call


TABLE: Mapping[str, Callable[[Site], Local]] = {
    "aten.layer_norm": _layer_norm,
    "aten.rms_norm": _layer_norm,
    "aten.group_norm": _group_norm,
    **{f"aten.{name}": _softmax for name in ("softmax", "_softmax", "log_softmax", "_log_softmax")},
    "aten._safe_softmax": _softmax,
}
