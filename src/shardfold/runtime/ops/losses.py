"""Losses: sums over this device's examples, divided by the count of all; classes in parts.

With the classes in parts, a row's loss is log(sum of exp) minus the picked logit. Its maximum is
all-reduced first, then the sum and the picked logit (and what weights and smoothing add) together;
backward needs nothing from the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from shardfold.operators.losses import MEAN, NONE
from shardfold.runtime.ops.local_op import (
    Context,
    Local,
    Site,
    as_autocast,
    only,
    statistics_dtype,
    summed,
)
from shardfold.runtime.ops.reductions import WholeSum
from shardfold.runtime.process_groups import Axes

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
    is_soft = site.rule.rule.operands[target] == site.rule.rule.operands[0]
    weight, smoothing = site.position("weight"), float(site.argument("label_smoothing", 0.0))
    reduction = site.argument("reduction", MEAN)
    ignored = int(site.argument("ignore_index", -100))
    if site.axes("c") and weight is not None and smoothing and not is_soft:
        raise site.unsupported("class weights together with label smoothing need whole classes")
    classes = _Classes.of(site, smoothing, ignored) if site.axes("c") else None

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        given, wanted = as_autocast(tensors[0]), tensors[target]
        weights = None if weight is None else tensors[weight]
        if classes is not None:
            split = classes.soft if is_soft else classes.picked
            rows, counted = split(given, wanted, weights, context)
        else:
            rows = cross_entropy(
                given,
                wanted,
                weights,
                ignore_index=ignored,
                reduction="none",
                label_smoothing=smoothing,
            )
            counted = None if is_soft else _counted(wanted, weights, ignored)
        if reduction == NONE:
            return rows
        if reduction == SUM:
            return rows.sum()
        if is_soft or counted is None:
            return rows.sum() / math.prod(site.size(f) for f in _rows(site))
        count = summed(context, counted.sum().to(_word(counted)), site, _rows(site))
        return rows.sum() / count.to(rows.dtype)

    return call


def _counted(wanted: Tensor, weights: Tensor | None, ignored: int) -> Tensor:
    """What each row counts for in a mean: 1 or its class's weight; 0 where it is ignored."""
    kept = wanted != ignored
    if weights is None:
        return kept
    return only(weights.detach()[wanted.masked_fill(~kept, 0)], kept)


def _word(counted: Tensor) -> torch.dtype:
    """A count is sent as four bytes, a sum of weights in at least as many."""
    return statistics_dtype(counted.dtype) if counted.is_floating_point() else torch.int32


@dataclass(frozen=True, slots=True)
class _Classes:
    """The loss of each row from a part of its logits; dim 1 (or the only dim) are the classes."""

    axes: Axes
    low: int
    high: int
    size: int
    dim: int
    smoothing: float
    ignored: int

    @classmethod
    def of(cls, site: Site, smoothing: float, ignored: int) -> _Classes:
        low, high = site.part("c")
        dim = min(1, site.inputs[0].rank - 1)
        return cls(site.axes("c"), low, high, site.size("c"), dim, smoothing, ignored)

    def picked(
        self, logits: Tensor, target: Tensor, weights: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor]:
        """Targets that are classes: each row's loss, and what it counts for in a mean."""
        kept = target != self.ignored
        mine = (target >= self.low) & (target < self.high) & kept
        local = (target - self.low).clamp(0, self.high - self.low - 1)
        if weights is None and not self.smoothing:
            where = (self.dim, self.axes, context)
            return _Picked.apply(logits, local, mine, kept, *where), kept
        x = self._shifted(logits, context)
        words = [x.exp().sum(self.dim), x.gather(self.dim, local.unsqueeze(self.dim)), mine]
        words[1] = only(words[1].squeeze(self.dim), mine)
        words[2:] = [] if weights is None else [only(weights.to(x.dtype)[local], mine)]
        words += [x.sum(self.dim)] if self.smoothing else []
        total, own, *more = WholeSum.apply(torch.stack(words), self.axes, context).unbind(0)
        log = total.log()
        rows = log - own if weights is None else (log - own) * more[0]
        if self.smoothing:
            every = log - more[-1] / self.size
            rows = (1 - self.smoothing) * rows + self.smoothing * every
        counted = kept if weights is None else only(more[0].detach(), kept)
        return only(rows, kept).to(logits.dtype), counted

    def soft(
        self, logits: Tensor, target: Tensor, weights: Tensor | None, context: Context
    ) -> tuple[Tensor, None]:
        """Targets that are probabilities: each row's loss."""
        x = self._shifted(logits, context)
        share = target * (1 - self.smoothing) + self.smoothing / self.size
        if weights is not None:
            shape = [-1 if d == self.dim else 1 for d in range(x.dim())]
            share = share * weights.view(shape)
        words = [x.exp().sum(self.dim), (share * x).sum(self.dim), share.sum(self.dim)]
        total, own, shares = WholeSum.apply(torch.stack(words), self.axes, context).unbind(0)
        return (total.log() * shares - own).to(logits.dtype), None

    def _shifted(self, logits: Tensor, context: Context) -> Tensor:
        return shifted(logits, self.dim, self.axes, context)


def shifted(logits: Tensor, dim: int, axes: Axes, context: Context) -> Tensor:
    """Logits less the row's largest anywhere."""
    return _less(logits, _largest(logits, dim, axes, context))


def _largest(logits: Tensor, dim: int, axes: Axes, context: Context) -> Tensor:
    most = logits.detach().amax(dim, keepdim=True).to(statistics_dtype(logits.dtype))
    return context.groups.all_reduce(most, axes, most=True)


def _less(logits: Tensor, row: Tensor) -> Tensor:
    """Logits less a number a row, in the dtype of statistics; no more than one copy is made."""
    wide = logits.to(row.dtype)
    return wide - row if wide is logits or wide.requires_grad else wide.sub_(row)


class _Picked(torch.autograd.Function):
    """Each row's loss with nothing added: its gradient is the row's shares, less one if picked.

    Shares are made again in backward, from the logits and a number a row: as much memory as on one
    device, where the logarithms of the shares are kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        local: Tensor,
        mine: Tensor,
        kept: Tensor,
        dim: int,
        axes: Axes,
        context: Context,
    ) -> Tensor:
        most = _largest(logits, dim, axes, context)
        x = _less(logits, most)
        own = only(x.gather(dim, local.unsqueeze(dim)).squeeze(dim), mine)
        words = context.groups.all_reduce(torch.stack([x.exp_().sum(dim), own]), axes)
        log = words[0].log()
        ctx.save_for_backward(logits, most + log.unsqueeze(dim), local, mine, kept)
        ctx.dim = dim
        return only(log - words[1], kept).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        logits, total, local, mine, kept = ctx.saved_tensors
        g = gradient.to(total.dtype)
        found = _less(logits, total).exp_().mul_(only(g, kept).unsqueeze(ctx.dim))
        index, less = local.unsqueeze(ctx.dim), only(g, mine).neg_().unsqueeze(ctx.dim)
        found.scatter_add_(ctx.dim, index, less)
        return found.to(logits.dtype), None, None, None, None, None, None


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
    if len(site.results) > 1 or target is None:
        raise site.unsupported("the divisor is a result of its own")
    reduction, ignored = site.argument("reduction", MEAN), int(site.argument("ignore_index", -100))
    pick = _own_classes(site, target, ignored) if site.axes("c") else None
    if pick is None and reduction != MEAN:
        return site.invoke

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        weights = None if weight is None else tensors[weight]
        if pick is None:
            total = site.invoke(tensors, context, reduction=SUM)
        else:
            rows = pick(tensors)
            total = rows if reduction == NONE else rows.sum()
            if reduction != MEAN:
                return total
        counted = _counted(tensors[target], weights, ignored)
        count = summed(context, counted.sum().to(_word(counted)), site, _rows(site))
        return total / count.to(total.dtype)

    return call


def _own_classes(site: Site, target: int, ignored: int) -> Callable[[Sequence[Tensor]], Tensor]:
    """Each row's loss where its class is in this part, zero elsewhere: parts of a sum."""
    low, high = site.part("c")
    dim = min(1, site.inputs[0].rank - 1)

    def pick(tensors: Sequence[Tensor]) -> Tensor:
        wanted = tensors[target]
        mine = (wanted >= low) & (wanted < high) & (wanted != ignored)
        local = (wanted - low).clamp(0, high - low - 1).unsqueeze(dim)
        return only(-tensors[0].gather(dim, local).squeeze(dim), mine)

    return pick


TABLE: Mapping[str, Callable[[Site], Local]] = {
    "aten.cross_entropy_loss": _cross_entropy,
    **{f"aten.{name}": _picked for name in ("nll_loss", "nll_loss_nd", "nll_loss2d")},
    **{
        f"aten.{name}": _pointwise
        for name in (
            *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div"),
            *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
        )
    },
}
