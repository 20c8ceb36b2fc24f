"""Mixture-of-experts as one operator: each row times the matrix of the expert it was sent to.

    expert_linear: x[... m], w[e n m], expert[...] -> y[... n],  y[r] = w[expert[r]] x[r]

The usual forms are no good to a planner: gathering a matrix per row (`batched_mm`) writes
rows * n * m elements that a real kernel never makes, and sorting the rows by expert
(`grouped_mm`) loses the batch dims. This one keeps the dims of the rows, so that rows, n, m and
e can each be split. A row whose expert is not in 0..e-1 gives zeros: a device that holds some of
the experts subtracts the first one's index, and the partial results add up.

Rows are put in the order of their experts, so that each matrix meets rows that lie together: one
gather, a product for each expert, one scatter. How many rows an expert has is the one thing that
the host must know, so it waits for the device once in a call; `SortedLinear` takes rows that were
sorted for another call, and waits for nothing.

Work: 2 * rows * n * m operations forward, twice that backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sorted:
    """The rows of the experts at hand, in the experts' order, and how many each has."""

    order: Tensor
    counts: list[int]
    places: Tensor | None  # where each row went, if all did: they are taken back faster than put

    @classmethod
    def of(cls, expert: Tensor, experts: int) -> Sorted:
        """Rows of other experts are sorted to the end, and left out."""
        order, found = asked(expert, experts)
        ends: list[int] = found.tolist()
        order = order[: ends[-1]]
        places = _inverse(order) if len(order) == expert.numel() else None
        return cls(order, [b - a for a, b in pairwise([0, *ends])], places)


def asked(expert: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Rows by expert, and where each expert's end: all that the host has to ask for."""
    to = expert.reshape(-1)
    keys, order = torch.where((to >= 0) & (to < experts), to, experts).sort(stable=True)
    marks = torch.arange(experts, device=to.device, dtype=keys.dtype)
    return order, torch.searchsorted(keys, marks, right=True)


def _inverse(order: Tensor) -> Tensor:
    rows = torch.arange(len(order), device=order.device)
    return torch.empty_like(rows).scatter_(0, order, rows)


@torch.library.custom_op("shardfold::expert_linear", mutates_args=())
def expert_linear(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    """Multiply each row of `x` by the matrix of its expert."""
    return _values(x, weight, Sorted.of(expert, weight.shape[0]), expert.shape)


def _values(x: Tensor, weight: Tensor, found: Sorted, rows: torch.Size) -> Tensor:
    mine = x.reshape(-1, x.shape[-1]).index_select(0, found.order)
    y = _multiplied(mine, weight.transpose(1, 2), found, rows.numel())
    return y.view(*rows, weight.shape[1])


def _multiplied(mine: Tensor, matrices: Tensor, found: Sorted, rows: int) -> Tensor:
    """Sorted rows times their experts' matrices, back in their places; zeros elsewhere."""
    products = mine.new_empty(len(mine), matrices.shape[2])
    pieces = zip(mine.split(found.counts), products.split(found.counts), strict=True)
    for (given, product), matrix in zip(pieces, matrices.to(mine.dtype).unbind(), strict=True):
        if len(given):
            torch.mm(given, matrix, out=product)
    if found.places is not None:
        return products.index_select(0, found.places)
    y = mine.new_zeros(rows, matrices.shape[2])
    return y.index_copy_(0, found.order, products)


@expert_linear.register_fake
def _(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    return x.new_empty(*expert.shape, weight.shape[1])


@torch.library.custom_op("shardfold::expert_linear_backward", mutates_args=())
def expert_linear_backward(
    dy: Tensor, x: Tensor, weight: Tensor, expert: Tensor, wanted: list[bool]
) -> tuple[Tensor, Tensor]:
    """The gradients of `x` and of `weight`, empty where they are not wanted.

    That of a weight is, for each expert, the sum of its rows' outer products.
    """
    return _gradients(dy, x, weight, Sorted.of(expert, weight.shape[0]), wanted)


def _gradients(
    dy: Tensor, x: Tensor, weight: Tensor, found: Sorted, wanted: list[bool]
) -> tuple[Tensor, Tensor]:
    rows = dy.shape[:-1]
    mine = dy.reshape(-1, dy.shape[-1]).index_select(0, found.order)
    dx, dw = x.new_empty(0), weight.new_empty(0)
    if wanted[0]:
        dx = _multiplied(mine, weight, found, rows.numel()).to(x.dtype).view(*rows, x.shape[-1])
    if wanted[1]:
        given = x.reshape(-1, x.shape[-1]).index_select(0, found.order).to(dy.dtype)
        dw = _outer(mine, given, found).to(weight.dtype)
    return dx, dw


def _outer(mine: Tensor, given: Tensor, found: Sorted) -> Tensor:
    """For each expert, the sum of the outer products of its rows."""
    dw = given.new_zeros(len(found.counts), mine.shape[1], given.shape[1])
    pieces = zip(mine.t().split(found.counts, 1), given.split(found.counts), strict=True)
    for (left, right), own in zip(pieces, dw.unbind(), strict=True):
        if len(right):
            torch.mm(left, right, out=own)
    return dw


@expert_linear_backward.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Tensor, expert: Tensor, wanted: list[bool]
) -> tuple[Tensor, Tensor]:
    rows = (*expert.shape, x.shape[-1]) if wanted[0] else (0,)
    return x.new_empty(rows), weight.new_empty(weight.shape if wanted[1] else (0,))


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    wanted = list(ctx.needs_input_grad[:2])
    dx, dw = expert_linear_backward(dy, *ctx.saved_tensors, wanted)
    return dx if wanted[0] else None, dw if wanted[1] else None, None


expert_linear.register_autograd(_backward, setup_context=_save)


class SortedLinear(torch.autograd.Function):
    """The same for rows that were sorted before: nothing is waited for, in either pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, found: Sorted, rows: torch.Size) -> Tensor:
        """Multiply each row by the matrix of its expert."""
        ctx.save_for_backward(x, weight)
        ctx.found = found
        return _values(x, weight, found, rows)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """The gradients of the rows and of the matrices."""
        wanted = list(ctx.needs_input_grad[:2])
        x, weight = ctx.saved_tensors
        dx, dw = _gradients(dy, x, weight, ctx.found, wanted)
        return dx if wanted[0] else None, dw if wanted[1] else None, None, None


def routed_experts(module: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The experts of a transformers block: `x` [rows, hidden] to its `chosen` [rows, k] experts.

    Has the signature of transformers' registry of experts' implementations, and reads the flags
    that transformers sets on such a block.
    """
    spread = x.unsqueeze(1).expand(-1, chosen.shape[1], -1)
    if module.has_gate:
        y = module._apply_gate(_project(module, "gate_up_proj", spread, chosen))
    else:
        y = module.act_fn(_project(module, "up_proj", spread, chosen))
    y = _project(module, "down_proj", y, chosen)
    if getattr(module, "has_post_expert_norm", False):
        y = module.post_expert_norm(y)
    return (y * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _project(module: Any, name: str, x: Tensor, chosen: Tensor) -> Tensor:
    weight = getattr(module, name)
    y = expert_linear(x, weight.transpose(1, 2) if module.is_transposed else weight, chosen)
    return y + getattr(module, f"{name}_bias")[chosen] if module.has_bias else y
