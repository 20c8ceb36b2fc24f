"""Convolution and pooling: channels in parts, and space with a halo from the neighbours.

A part of the output rows owns the input rows of the same part, and reads some rows of the parts
before and after it. The rows beyond the edge of the whole are padding: zeros for a convolution or
an average, minus infinity for a maximum. What is exchanged forward goes back, and is added, as
the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold.operators.convolution import SPATIAL, Window, each
from shardfold.runtime.ops.local_op import Context, Local, Site
from shardfold.runtime.ops.matrix import once
from shardfold.runtime.process_groups import Axes, Functional, Groups


class _Halo(torch.autograd.Function):
    """Add the neighbours' rows on both sides of a dim."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dim: int,
        rows: tuple[int, int],
        fill: float,
        axes: Axes,
        groups: Groups,
    ) -> Tensor:
        ctx.dim, ctx.rows, ctx.axes, ctx.groups = dim, rows, axes, groups
        before, after = rows
        length = x.shape[dim]
        first = x.narrow(dim, 0, after).contiguous()
        last = x.narrow(dim, length - before, before).contiguous()
        above, below = _swap(first, last, axes, groups, fill)
        return torch.cat([above, x, below], dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        before, after = ctx.rows
        length = gradient.shape[ctx.dim] - before - after
        above = gradient.narrow(ctx.dim, 0, before).contiguous()
        below = gradient.narrow(ctx.dim, before + length, after).contiguous()
        own = gradient.narrow(ctx.dim, before, length).clone()
        from_above, from_below = _swap(above, below, ctx.axes, ctx.groups, 0.0)
        own.narrow(ctx.dim, 0, after).add_(from_above)
        own.narrow(ctx.dim, length - before, before).add_(from_below)
        return own, None, None, None, None, None


def _swap(
    up: Tensor, down: Tensor, axes: Axes, groups: Groups, fill: float
) -> tuple[Tensor, Tensor]:
    """Send `up` to the part before and `down` to the part after; get what they send here.

    What comes from before has the shape of `down`, what comes from after that of `up`.
    """
    members = groups.place.members(axes)
    me = members.index(groups.place.at)
    if isinstance(groups, Functional):
        return _swap_traced(up, down, axes, groups, fill)
    above, below = torch.full_like(down, fill), torch.full_like(up, fill)
    steps, group = [], groups.by_axes[axes]
    for other, sent, found in ((me - 1, up, above), (me + 1, down, below)):
        if 0 <= other < len(members):
            rank = groups.rank_of(members[other])
            steps += [dist.P2POp(dist.isend, sent, rank, group)] if sent.numel() else []
            steps += [dist.P2POp(dist.irecv, found, rank, group)] if found.numel() else []
    for work in dist.batch_isend_irecv(steps) if steps else ():
        work.wait()
    return above, below


def _swap_traced(
    up: Tensor, down: Tensor, axes: Axes, groups: Groups, fill: float
) -> tuple[Tensor, Tensor]:
    """The same for a compiler, which knows an all-to-all but nothing between two devices."""
    members = groups.place.members(axes)
    me = members.index(groups.place.at)
    sent = [up.new_empty(0) for _ in members]
    counts = [0 for _ in members]
    if me > 0:
        sent[me - 1], counts[me - 1] = up, down.numel()
    if me + 1 < len(members):
        sent[me + 1], counts[me + 1] = down, up.numel()
    found = groups.all_to_all(sent, counts, axes)
    above = found[me - 1].view_as(down) if me > 0 else torch.full_like(down, fill)
    is_last = me + 1 == len(members)
    below = torch.full_like(up, fill) if is_last else found[me + 1].view_as(up)
    return above, below


def _windows(site: Site, kernel: Sequence[int]) -> list[Window]:
    rank = len(kernel)
    stride = each(site.argument("stride") or list(kernel), rank)
    dilation = each(site.argument("dilation", 1), rank)
    given = site.argument("padding", 0)
    if isinstance(given, str):
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        padding = tuple(r // 2 if given == "same" else 0 for r in reach)
    else:
        padding = each(given, rank)
    sizes = (site.inputs[0].whole[-rank:], site.results[0].whole[-rank:])
    found = zip(SPATIAL[-rank:], *sizes, kernel, stride, padding, dilation, strict=True)
    return [Window(*values) for values in found]


def _with_halo(site: Site, kernel: Sequence[int], fill: float) -> Callable[..., Any] | None:
    """A call on rows with their halo and without padding there; None if no space is split."""
    dims = _windows(site, kernel)
    split = [(k, dim) for k, dim in enumerate(dims) if site.axes(dim.factor) and any(dim.halo)]
    if not split:
        return None
    rank = site.inputs[0].rank
    padding = [0 if site.axes(dim.factor) else dim.padding for dim in dims]

    def call(tensors: Sequence[Tensor], context: Context, **changed: Any) -> Any:
        x = tensors[0]
        for k, dim in split:
            at, axes = rank - len(dims) + k, site.axes(dim.factor)
            x = _Halo.apply(x, at, dim.halo, fill, axes, context.groups)
        return site.invoke([x, *tensors[1:]], context, padding=padding, **changed)

    return call


def _convolution(site: Site) -> Local:
    if site.argument("transposed", False) or "transpose" in site.op.kind:
        if site.axes("g"):
            raise site.unsupported("groups of a transposed convolution")
        reduced, halo = ("c",), None
    else:
        reduced = ("c",)
        halo = _with_halo(site, site.inputs[1].whole[2:], 0.0)
    if halo is not None and isinstance(site.argument("padding"), str):
        raise site.unsupported("a padding by name with space in parts")
    prepared = once(site, "bias", *reduced)
    groups = site.argument("groups", 1)
    if site.axes("g"):
        groups = site.points("g")
    run = halo or site.invoke

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        return run(prepared(tensors), context, groups=groups)

    return call


def _pool(fill: float) -> Callable[[Site], Local]:
    def make(site: Site) -> Local:
        rank = int(site.op.kind.partition("pool")[2][0])
        kernel = each(site.argument("kernel_size"), rank)
        found = _with_halo(site, kernel, fill)
        if found is None:
            return site.invoke
        if site.argument("ceil_mode", False):
            raise site.unsupported("ceil_mode with space in parts")
        if fill == 0.0 and any(w.padding for w in _windows(site, kernel)):
            if not site.argument("count_include_pad", True) or site.argument("divisor_override"):
                raise site.unsupported("an average that does not count its padding")
            return _average(site, kernel, found)
        return found

    return make


def _average(site: Site, kernel: Sequence[int], halo: Callable[..., Any]) -> Local:
    """Padding counts: every window divides by all of its taps."""
    return lambda tensors, context: halo(tensors, context, divisor_override=math.prod(kernel))


TABLE: Mapping[str, Callable[[Site], Local]] = {
    **{f"aten.conv{k}d": _convolution for k in (1, 2, 3)},
    **{f"aten.conv_transpose{k}d": _convolution for k in (1, 2, 3)},
    "aten.convolution": _convolution,
    **{f"aten.max_pool{k}d": _pool(-math.inf) for k in (1, 2, 3)},
    **{f"aten.max_pool{k}d_with_indices": _pool(-math.inf) for k in (1, 2, 3)},
    **{f"aten.avg_pool{k}d": _pool(0.0) for k in (1, 2, 3)},
    **{f"aten.adaptive_max_pool{k}d": lambda site: site.invoke for k in (1, 2, 3)},
}
