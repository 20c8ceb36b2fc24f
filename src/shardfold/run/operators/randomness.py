"""Dropout by global position; other random operators are refused.

A device that drew its own random numbers would hold other copies than the rest, or another mask
than one device would have drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardfold.errors import RunError
from shardfold.run.operators.positions import keep_mask, pieces_of
from shardfold.run.operators.site import Context, Local, Site

SATURATED = 1.7580993408473766  # where a SELU saturates, without its sign
RANDOM = (
    "rand randn randint randperm rand_like randn_like randint_like bernoulli native_dropout "
    "multinomial normal uniform exponential poisson rrelu"
).split()


def _dropout(site: Site) -> Local:
    p, train = float(site.argument("p")), bool(site.argument("train", True))
    if not train or not p:
        return lambda tensors, context: tensors[0]
    pieces = pieces_of(site.results[0])
    apply = _alpha if "alpha" in site.op.kind else _zeros
    if "feature" in site.op.kind:  # a channel of an example is dropped as a whole
        pieces = [*pieces[:2], *([] for _ in pieces[2:])]

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        x = tensors[0]
        if p == 1.0:
            return x * 0
        kept = keep_mask(pieces, p, context, site.number)
        return apply(x, kept.to(x.dtype), p)

    return call


def _zeros(x: Tensor, kept: Tensor, p: float) -> Tensor:
    return x * kept.div_(1 - p)


def _alpha(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """What is dropped takes the value where a SELU saturates, mean and variance stay."""
    scale = 1 / math.sqrt((SATURATED**2 * p + 1) * (1 - p))
    return x * (kept * scale) + (kept - 1 + p) * (SATURATED * scale)


def _refused(site: Site) -> Local:
    raise RunError(
        f"Operator {site.op.name} ({site.op.kind}, {site.op.origin}) draws random numbers, which "
        "would differ between devices and from one device. Use nn.Dropout, or draw outside the "
        "model and pass the numbers in."
    )


def dropped(weights: Tensor, pieces: Any, p: float, context: Context, operator: int) -> Tensor:
    """Attention weights after dropout."""
    kept = keep_mask(pieces, p, context, operator)
    return weights * kept.to(weights.dtype).div_(1 - p)


DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
TABLE: Mapping[str, Callable[[Site], Local]] = {
    **{f"aten.{name}": _dropout for name in DROPOUTS},
    **{f"aten.{name}": _refused for name in RANDOM},
}
