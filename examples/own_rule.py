"""A model with an operator of its own, and the rule that lets shardfold split it.

shardfold plan examples/own_rule.py:make --cluster 8xa100
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardfold.operators.call import Call
from shardfold.operators.notation import Rule


@torch.library.custom_op("mine::low_rank", mutates_args=())
def low_rank(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Multiply by a matrix that is the product of two thin ones."""
    return x @ down.T @ up.T


@low_rank.register_fake
def _(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], up.shape[0])


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, down, up = ctx.saved_tensors
    middle, dmiddle = x @ down.T, dy @ up
    flat = x.flatten(0, -2), dmiddle.flatten(0, -2), dy.flatten(0, -2), middle.flatten(0, -2)
    return dmiddle @ down, flat[1].T @ flat[0], flat[2].T @ flat[3]


low_rank.register_autograd(_backward, setup_context=_save)


def low_rank_rule(call: Call) -> Rule:
    """Rows split freely; a split of the rank r leaves a pending sum, as no result carries r.

    The in features m and the out features n each take part in only one of the two products. A
    split of either would leave the other product undivided on every device, so they stay whole.
    """
    rows = tuple(f"i{k}" for k in range(len(call.shape("x")) - 1))
    (_, wide_in), (wide_out, _) = call.shape("down"), call.shape("up")
    return call.rule(
        {"x": "... m", "down": "r m", "up": "n r"},
        "... n",
        engine="matrix",
        over=(*rows, "r"),  # work is counted per row and rank,
        flops=2.0 * (wide_in + wide_out),  # a multiply-add for each in and each out feature
        whole=frozenset({"m", "n"}),
        saves=("x", "down", "up"),
        backward=2.5,  # two products for each of the two forward, and the first one again
    )


RULES = {"mine.low_rank": low_rank_rule}


class Net(nn.Module):
    """Two thin products and a loss."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, width))
        self.up = nn.Parameter(torch.empty(width, rank))

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of what comes out."""
        return low_rank(x, self.down, self.up).square().mean()


def make(batch: int = 8192) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model and an example batch."""
    with torch.device("meta"):
        return Net(width=8192, rank=512), (torch.empty(batch, 8192),), {}
