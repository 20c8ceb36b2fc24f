"""A model with an operator of its own, and the description that lets shardfold split it.

shardfold plan examples/own_rule.py:make --cluster 8xa100
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardfold.operators import Access, Call, Extra, Kernel, LocalWork, Operator, Rule


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
        {"x": "... m", "down": "r m", "up": "n r"},  # operands, by their names in the schema
        "... n",  # the result
        engine="matrix",
        over=(*rows, "r"),  # work is counted per row and rank,
        flops=2.0 * (wide_in + wide_out),  # a multiply-add for each in and each out feature
        whole=frozenset({"m", "n"}),
        saves=("x", "down", "up"),
        backward=2.5,  # two products for each of the two forward, and the first one again
    )


def low_rank_kernels(work: LocalWork, phase: str) -> list[Kernel]:
    """Two products of so many rows, columns and inner features; backward, five."""
    m, n, r = work.factor("m"), work.factor("n"), work.factor("r")
    rows = work.operand_items(0) / m
    first = Kernel("matmul.nt", work.dtype, (rows, r, m))
    second = Kernel("matmul.nt", work.dtype, (rows, n, r))
    return [first, second] if phase != "backward" else [first, first, first, second, second]


def low_rank_extras(call: Call, access: Access) -> tuple[Extra, ...]:
    """Backward makes the thin middle once more: so many bytes for each row of x."""
    rank, _ = call.shape("down")
    return (Extra(0, float(rank * call.inputs[0].item_bytes), over=1, life="backward"),)


RULES = {
    "mine.low_rank": Operator(
        low_rank_rule,
        kernels=low_rank_kernels,
        extras=low_rank_extras,
        makes_result=True,
        makes_gradients=frozenset({"x", "down", "up"}),
    )
}


class Net(nn.Module):
    """Two thin products and a loss."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, width) / width**0.5)
        self.up = nn.Parameter(torch.randn(width, rank) / rank**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of what comes out."""
        return low_rank(x, self.down, self.up).square().mean()


def make(batch: int = 8192) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model and an example batch."""
    with torch.device("meta"):
        return Net(width=8192, rank=512), (torch.empty(batch, 8192),), {}


def small() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The same with numbers, small enough for any machine."""
    torch.manual_seed(0)
    return Net(width=32, rank=8), (torch.randn(16, 32),), {}
