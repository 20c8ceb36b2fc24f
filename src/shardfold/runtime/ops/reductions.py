"""Sums inside an operator whose result is whole on every device.

Means: the sum of the local part, divided by the count of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfold.operators.convolution import SPATIAL
from shardfold.runtime.ops.local_op import Context, Local, Site, statistics_dtype
from shardfold.runtime.process_groups import Axes


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


def _mean(site: Site) -> Local:
    rank = site.inputs[0].rank
    given = site.argument("dim", ())
    given = (given,) if isinstance(given, int) else tuple(given)
    dims = [d % rank for d in given] or list(range(rank))
    if not any(site.rule.base(f) in {f"i{d}" for d in dims} for f in site.config if f >= 0):
        return site.invoke
    count = math.prod(site.inputs[0].whole[d] for d in dims)
    keep = bool(site.argument("keepdim", False))
    dtype = site.argument("dtype")

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        wanted = context.target.constant(dtype)
        return torch.sum(tensors[0], dims, keepdim=keep, dtype=wanted) / count

    return call


def _adaptive(site: Site) -> Local:
    """To size 1: a mean, of which a part of the rows gives a part; otherwise local windows."""
    shape = site.results[0].shape
    space = SPATIAL[-len(site.argument("output_size")) :]
    lead = len(shape) - len(space)
    share = 1.0
    for k, factor in enumerate(space):
        if site.axes(factor) and site.results[0].whole[lead + k] == 1:
            share *= site.inputs[0].shape[lead + k] / site.inputs[0].whole[lead + k]
    size = [max(n, 1) for n in shape[lead:]]

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        found = site.invoke(tensors, context, output_size=size)
        return found if share == 1.0 else found * share

    return call


def _logsumexp(site: Site) -> Local:
    """The maximum of each row comes first, then its sum of exponentials."""
    rank = site.inputs[0].rank
    given = site.argument("dim")
    dims = [d % rank for d in ((given,) if isinstance(given, int) else given)]
    factors = [f"i{d}" for d in dims]
    if not site.axes(*factors):
        return site.invoke
    if len([f for f in factors if site.axes(f)]) > 1:
        raise site.unsupported("several reduced dims in parts")
    axes, keep = site.axes(*factors), bool(site.argument("keepdim", False))

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        x = tensors[0].to(statistics_dtype(tensors[0].dtype))
        most = context.groups.all_reduce(x.detach().amax(dims, keepdim=True), axes, most=True)
        most = most.masked_fill(most.isinf(), 0)  # infinity less infinity is not a number
        total = WholeSum.apply((x - most).exp().sum(dims, keepdim=True), axes, context)
        found = (total.log() + most).to(tensors[0].dtype)
        return found if keep else found.squeeze(dims)

    return call


TABLE: Mapping[str, Callable[[Site], Local]] = {
    "aten.mean": _mean,
    "aten.logsumexp": _logsumexp,
    **{f"aten.adaptive_avg_pool{k}d": _adaptive for k in (1, 2, 3)},
}
