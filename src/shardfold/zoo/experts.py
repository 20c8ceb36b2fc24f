"""Mixture-of-experts as one operator: each row times the matrix of the expert it was sent to.

    expert_linear: x[... m], w[e n m], expert[...] -> y[... n],  y[r] = w[expert[r]] x[r]

The usual forms are no good to a planner: gathering a matrix per row (`batched_mm`) writes
rows * n * m elements that a real kernel never makes, and sorting the rows by expert
(`grouped_mm`) loses the batch dims. This one keeps the dims of the rows, so that rows, n, m and
e can each be split. A row whose expert is not in 0..e-1 gives zeros: a device that holds some of
the experts subtracts the first one's index, and the partial results add up.

Work: 2 * rows * n * m operations forward, twice that backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("shardfold::expert_linear", mutates_args=())
def expert_linear(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    """Multiply each row of `x` by the matrix of its expert."""
    rows, to = x.reshape(-1, x.shape[-1]), expert.reshape(-1)
    y = rows.new_zeros(rows.shape[0], weight.shape[1])
    for index in range(weight.shape[0]):
        mine = (to == index).nonzero().flatten()
        y[mine] = rows[mine] @ weight[index].T
    return y.view(*expert.shape, weight.shape[1])


@expert_linear.register_fake
def _(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    return x.new_empty(*expert.shape, weight.shape[1])


@torch.library.custom_op("shardfold::expert_linear_weight_grad", mutates_args=())
def expert_linear_weight_grad(x: Tensor, dy: Tensor, expert: Tensor, experts: int) -> Tensor:
    """The gradient of `weight`: for each expert, the sum of its rows' outer products."""
    rows, to = x.reshape(-1, x.shape[-1]), expert.reshape(-1)
    dys = dy.reshape(-1, dy.shape[-1])
    grad = x.new_zeros(experts, dys.shape[1], rows.shape[1])
    for index in range(experts):
        mine = (to == index).nonzero().flatten()
        grad[index] = dys[mine].T @ rows[mine]
    return grad


@expert_linear_weight_grad.register_fake
def _(x: Tensor, dy: Tensor, expert: Tensor, experts: int) -> Tensor:
    return x.new_empty(experts, dy.shape[-1], x.shape[-1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, expert = ctx.saved_tensors
    dx = expert_linear(dy, weight.transpose(1, 2), expert)
    return dx, expert_linear_weight_grad(x, dy, expert, weight.shape[0]), None


expert_linear.register_autograd(_backward, setup_context=_save)


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
