"""Losses: examples are summed over, classes split with a few words a row.

`b c, b ->`: a split of the batch leaves a partial sum of the loss; a mean divides by the count of
the whole batch. Under a class split each row's maximum, sum and picked logit are all-reduced, and
the result is complete on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardfold.operators.call import Call
from shardfold.operators.norms import statistics_bytes
from shardfold.operators.notation import Exchange, Rule

NONE, MEAN = 0, 1


def _rows(call: Call) -> tuple[list[str], list[str]]:
    """The factors of the input `b c d1 ..` (or `c` alone), and of those without the classes."""
    rank = len(call.shape("self"))
    full = ["c"] if rank == 1 else ["b", "c", *(f"i{k}" for k in range(2, rank))]
    return full, [f for f in full if f != "c"]


def _count(call: Call, rows: list[str]) -> tuple[Exchange, ...]:
    """A mean divides by a count (or weight) that depends on every part's targets."""
    if call.attribute("reduction", MEAN) != MEAN:
        return ()
    size = 4
    if call.has("weight"):
        size = statistics_bytes(call.inputs[call.position("weight")])
    return tuple(Exchange("all_reduce", row, (), item_bytes=size) for row in rows)


def _cross_entropy(call: Call) -> Rule:
    full, rows = _rows(call)
    soft = call.inputs[call.position("target")].is_floating
    # The maximum comes first: the sum of exponentials needs it. Sum and picked logit go together;
    # soft targets, weights and smoothing add a sum each.
    words = 2.0 + soft + call.has("weight") + (call.attribute("label_smoothing", 0.0) > 0)
    size = statistics_bytes(call.inputs[0])
    classes = [Exchange("all_reduce", "c", tuple(rows), n, size) for n in (1.0, words)]
    return call.rule(
        {"self": " ".join(full), "target": " ".join(full if soft else rows), "weight": "c"},
        " ".join(rows) if call.attribute("reduction", MEAN) == NONE else "",
        flops=6.0,
        resolved=frozenset({"c"}),
        exchanges=(*classes, *(() if soft else _count(call, rows))),
        saves=("self", "target", "weight"),
        backward=1.0,
    )


def _nll(call: Call) -> Rule:
    """Log-probabilities are picked: a part of the classes holds a part of the sum.

    Class weights divide a mean by what other parts picked, and a second result is that divisor:
    with either, classes stay whole.
    """
    full, rows = _rows(call)
    whole = call.has("weight") or len(call.results) > 1
    loss = " ".join(rows) if call.attribute("reduction", MEAN) == NONE else ""
    return call.rule(
        {"self": " ".join(full), "target": " ".join(rows), "weight": "c"},
        *([loss] if len(call.results) == 1 else [loss, ""]),
        flops=1.0,
        over=tuple(rows),
        whole=frozenset({"c"} if whole else ()),
        exchanges=_count(call, rows),
        saves=("target", "weight"),
        backward=1.0,
    )


def _pointwise(call: Call) -> Rule:
    """A function of prediction and target at each point, then a sum or mean of all points.

    The number of points is known, so a mean is a partial sum divided by it.
    """
    rank = max(len(kind.shape) for kind in call.inputs)
    names = [f"i{k}" for k in range(rank)]
    padded = [(1,) * (rank - len(kind.shape)) + kind.shape for kind in call.inputs]
    sizes = {name: max(shape[k] for shape in padded) for k, name in enumerate(names)}
    operands = {
        operand.name: " ".join(names[len(names) - len(kind.shape) :])
        for operand, kind in zip(call.op.operands, call.inputs, strict=True)
    }
    return call.rule(
        operands,
        " ".join(names) if call.attribute("reduction", MEAN) == NONE else "",
        sizes=sizes,
        flops=3.0,
        saves=("self", "target", "weight", "pos_weight"),
        backward=1.0,
    )


POINTWISE = [
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "soft_margin_loss",
    "kl_div",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
]
PICKED = ["nll_loss", "nll_loss_nd", "nll_loss2d", "nll_loss_forward", "nll_loss2d_forward"]

TABLE: Mapping[str, Callable[[Call], Rule]] = {
    "aten.cross_entropy_loss": _cross_entropy,
    **{f"aten.{name}": _nll for name in PICKED},
    **{f"aten.{name}": _pointwise for name in POINTWISE},
}
