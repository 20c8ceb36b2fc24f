"""Functions of torch that are traced as others which compute the same.

Their own code asks for the values of tensors, draws random numbers in an operator of its own, or
works on many tensors in one operator.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

FOREACH = "_foreach_"
SCALED = ("addcmul", "addcdiv", "addcmul_", "addcdiv_")  # their last argument has a name


def adaptive_loss(module: nn.AdaptiveLogSoftmaxWithLoss, given: Tensor, target: Tensor) -> Any:
    """Adaptive softmax: every row goes through every cluster, and is taken from its own."""
    rows, labels = (given, target) if target.dim() else (given[None], target[None])
    output, place = rows.new_zeros(len(rows)), labels
    for number, (low, high) in enumerate(pairwise(module.cutoffs)):
        is_inside = (labels >= low) & (labels < high)
        own = F.log_softmax(module.tail[number](rows), 1)
        chosen = own.gather(1, (labels - low).clamp(0, high - low - 1)[:, None])[:, 0]
        output = output + torch.where(is_inside, chosen, 0)
        place = torch.where(is_inside, module.shortlist_size + number, place)
    head = F.log_softmax(module.head(rows), 1)
    output = output + head.gather(1, place[:, None])[:, 0]
    loss = -output.mean()
    made = nn.modules.adaptive._ASMoutput
    return made(output if target.dim() else output[0], loss)


def random_leaky(
    x: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    """`rrelu`: every slope is a uniform random number."""
    slope = torch.empty_like(x).uniform_(lower, upper) if training else (lower + upper) / 2
    found = torch.where(x > 0, x, x * slope)
    return x.copy_(found) if inplace else found


def covariance(
    x: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    """`cov`, which asks whether its divisor is positive."""
    weights = torch.ones((), dtype=x.dtype) if fweights is None else fweights
    weights = weights * (1 if aweights is None else aweights)
    rows = x if x.dim() > 1 else x.reshape(1, -1)
    total = weights.expand(rows.shape[1]).sum()
    apart = rows - (rows * weights).sum(1, keepdim=True) / total
    less: Tensor | int = correction
    if aweights is not None:
        less = correction * (weights * aweights).sum() / total
    found = (apart * weights) @ apart.conj().T / (total - less)
    return found if x.dim() > 1 else found[0, 0]


def correlation(x: Tensor) -> Tensor:
    """`corrcoef`: covariances over both deviations."""
    found = covariance(x)
    if x.dim() < 2:
        return found / found
    scale = found.diagonal().real.sqrt()
    found = found / scale[:, None] / scale
    return found if found.is_complex() else found.clamp(-1, 1)


def one_by_one(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`torch._foreach_...`: the function of single tensors, for each of a list."""
    name = func.__name__.removeprefix(FOREACH)
    single = torch.linalg.vector_norm if name == "norm" else getattr(Tensor, name, None)
    if single is None or not isinstance(args[0], list | tuple):
        return func(*args, **kwargs)
    if name in SCALED and len(args) == 4:
        args, kwargs = args[:3], {"value": args[3], **kwargs}

    def at(value: Any, number: int) -> Any:
        return value[number] if isinstance(value, list | tuple) else value

    found = [
        single(*(at(a, k) for a in args), **{key: at(v, k) for key, v in kwargs.items()})
        for k in range(len(args[0]))
    ]
    return None if name.endswith("_") else found
