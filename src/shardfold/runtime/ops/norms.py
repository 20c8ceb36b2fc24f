"""Normalisations and softmax: statistics are reduced over the devices that share them.

Forward and backward each all-reduce a few sums a row (or channel); these are the rule's exchanges.
With g = dy * w and x^ the normalised input, dx = r (g - mean(g) - x^ mean(g x^)).

A variance from two sums, mean(x^2) - mean(x)^2, loses digits where the mean is larger than the
deviations. So each device sums the deviations from its own mean m, and sends n m and
sum((x - m)^2) + n m^2 in float64, which has digits to spare.

In batch norm, the devices that share a batch reduce the statistics of channels. Every device sums
the deviations from its own mean; mean and variance of all follow from one all-reduce (`moments`).
Backward all-reduces two sums a channel. With m the mean, r the inverse deviation and N the count of
all devices:

    y  = (x - m) r w + b
    dx = (g - sum(g) / N - (x - m) r^2 sum(g (x - m)) / N) r w

What is kept is the input and two numbers a channel, as on one device. On a GPU the four passes are
PyTorch's own kernels for this (those of `SyncBatchNorm`); elsewhere, and for a compiler, they are
written out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


Pair = tuple[Tensor, Tensor]


class Written:
    """The passes over one device's part, in plain operators; numbers a channel are vectors."""

    @staticmethod
    def spread(x: Tensor) -> Pair:
        """The mean, and the sum of the squared deviations from it."""
        wide, dims = x.to(statistics_dtype(x.dtype)), _all_but_channels(x)
        here = math.prod(x.shape[d] for d in dims)
        mean = wide.sum(dims) / max(here, 1)
        return mean, (wide - _column(mean, x)).square().sum(dims)

    @staticmethod
    def normalised(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, scale: Tensor
    ) -> Tensor:
        """The result."""
        factor = scale if weight is None else scale * weight
        y = (x - _column(mean, x)) * _column(factor, x)
        return (y if bias is None else y + _column(bias, x)).to(x.dtype)

    @staticmethod
    def sums(g: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> Pair:
        """Of the result's gradient, and of its product with the deviations."""
        wide, dims = g.to(mean.dtype), _all_but_channels(x)
        return wide.sum(dims), (wide * (x - _column(mean, x))).sum(dims)

    @staticmethod
    def gradient(
        g: Tensor,
        x: Tensor,
        weight: Tensor | None,
        statistics: Pair,
        sums: Pair,
        count: int,
    ) -> Tensor:
        """Of the input, from the sums of all devices."""
        mean, scale = statistics
        factor = scale if weight is None else scale * weight
        along = sums[1] * scale.square() / count
        apart = (x - _column(mean, x)) * _column(along, x)
        found = (g.to(mean.dtype) - _column(sums[0] / count, x) - apart) * _column(factor, x)
        return found.to(x.dtype)


class Native:
    """The same passes by PyTorch's kernels for CUDA: nothing as large as the input is made."""

    @staticmethod
    def spread(x: Tensor) -> Pair:
        """The mean, and the sum of the squared deviations from it."""
        mean, scale = torch.batch_norm_stats(x.contiguous(), SMALL)
        here = x.numel() // x.shape[1]
        return mean, (scale.double().pow(-2) - SMALL).mul_(here)

    @staticmethod
    def normalised(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, scale: Tensor
    ) -> Tensor:
        """The result."""
        found: Tensor = torch.batch_norm_elemt(x.contiguous(), weight, bias, mean, scale, SMALL)
        return found

    @staticmethod
    def sums(g: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> Pair:
        """Of the result's gradient, and of its product with the deviations."""
        given = (g.contiguous(), x.contiguous(), mean, scale, None)
        total, along, _, _ = torch.batch_norm_backward_reduce(*given, True, False, False)
        return total, along

    @staticmethod
    def gradient(
        g: Tensor,
        x: Tensor,
        weight: Tensor | None,
        statistics: Pair,
        sums: Pair,
        count: int,
    ) -> Tensor:
        """Of the input, from the sums of all devices."""
        total = torch.full((1,), count, dtype=torch.int32, device=x.device)
        given = (g.contiguous(), x.contiguous(), *statistics, weight)
        found: Tensor = torch.batch_norm_backward_elemt(*given, *sums, total)
        return found


SMALL = 1e-12  # added to a variance where an inverse deviation is asked for, and taken off again


@dataclass(frozen=True, slots=True)
class Shared:
    """What a batch norm shares with other devices: the count of a channel, and how to sum up."""

    count: int
    eps: float
    reduce: Callable[[Tensor], Tensor]
    passes: type[Written | Native]


class BatchNorm(torch.autograd.Function):
    """Batch norm of a part; also gives the mean and variance of the whole."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, shared: Shared
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Two passes, and a sum over devices between them."""
        own, spread = shared.passes.spread(x)
        here = x.numel() // max(x.shape[1], 1)
        mean, variance = moments(own, spread, here, shared.count, shared.reduce)
        statistics = mean.to(own.dtype), (variance + shared.eps).rsqrt().to(own.dtype)
        y = shared.passes.normalised(x, _wide(weight, own), _wide(bias, own), *statistics)
        ctx.save_for_backward(x, weight, *statistics)
        ctx.shared = shared
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
        """As forward: sums, and then the gradient."""
        x, weight, mean, scale = ctx.saved_tensors
        shared: Shared = ctx.shared
        sums = shared.passes.sums(gradient, x, mean, scale)
        found: list[Tensor | None] = [None, None, None]
        if ctx.needs_input_grad[1]:
            found[1] = (sums[1] * scale).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            found[2] = sums[0].to(weight.dtype if weight is not None else gradient.dtype)
        if ctx.needs_input_grad[0]:
            total, along = shared.reduce(torch.stack(sums))
            wide, statistics = _wide(weight, mean), (mean, scale)
            found[0] = shared.passes.gradient(
                gradient, x, wide, statistics, (total, along), shared.count
            )
        return *found, None


def _wide(given: Tensor | None, like: Tensor) -> Tensor | None:
    return None if given is None else given.to(like.dtype)


def _all_but_channels(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _column(row: Tensor, x: Tensor) -> Tensor:
    return row.view([1, -1, *[1] * (x.dim() - 2)])


def passes_for(x: Tensor, is_traced: bool) -> type[Written | Native]:
    """How the passes over a part are done."""
    return Native if x.is_cuda and x.numel() and not is_traced else Written


def _batch_norm(site: Site) -> Local:
    factors = ["b", *(f"i{k}" for k in range(2, site.inputs[0].rank))]
    running = site.position("running_mean")
    training = bool(site.argument("training", True)) or running is None
    if not training or not site.axes(*factors):
        return site.invoke
    count = math.prod(n for d, n in enumerate(site.inputs[0].whole) if d != 1)
    weight, bias = site.position("weight"), site.position("bias")
    variances = site.position("running_var")
    eps, momentum = float(site.argument("eps", 1e-5)), float(site.argument("momentum", 0.1))

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        x = tensors[0]
        scaled = [None if at is None else tensors[at] for at in (weight, bias)]
        reduce = reducer(site, context, factors)
        shared = Shared(count, eps, reduce, passes_for(x, context.traced))
        y, mean, variance = BatchNorm.apply(x, *scaled, shared)
        if running is not None and variances is not None:
            unbiased = variance * (count / max(count - 1, 1))
            for at, new in ((running, mean), (variances, unbiased)):
                # As torch's own kernels write them: autograd, which may have saved them for
                # another call, is not told, since backward does not read them.
                held = tensors[at] if context.traced else tensors[at].data
                held.lerp_(new.to(held.dtype), momentum)
        return y

    return call


TABLE: Mapping[str, Callable[[Site], Local]] = {
    "aten.batch_norm": _batch_norm,
    "aten.layer_norm": _layer_norm,
    "aten.rms_norm": _layer_norm,
    "aten.group_norm": _group_norm,
    **{f"aten.{name}": _softmax for name in ("softmax", "_softmax", "log_softmax", "_log_softmax")},
    "aten._safe_softmax": _softmax,
}
