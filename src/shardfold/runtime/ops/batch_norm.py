"""Batch norm whose channels' statistics are reduced over the devices that share a batch.

Every device sums the deviations from its own mean; mean and variance of all follow from one
all-reduce (`normalisation.moments`). Backward all-reduces two sums a channel. With m the mean, r
the inverse deviation and N the count of all devices:

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

from shardfold.runtime.ops.local_op import Context, Local, Site, statistics_dtype
from shardfold.runtime.ops.norms import moments, reducer

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
                tensors[at].lerp_(new.to(tensors[at].dtype), momentum)
        return y

    return call


TABLE: Mapping[str, Callable[[Site], Local]] = {"aten.batch_norm": _batch_norm}
