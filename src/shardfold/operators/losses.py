"""Losses: examples are summed over, a split of classes exchanges a few numbers for each row.

`b c, b ->`: a split of the batch leaves a partial sum of the loss; a mean divides by the count of
the whole batch. Under a class split each row's maximum, sum and picked logit are all-reduced, and
the result is complete on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardfold.graph import Op
from shardfold.operators.kernels import Access, Kernel, LocalWork, memory_pass, reordered, way
from shardfold.operators.norms import statistics_bytes
from shardfold.operators.notation import Call, Exchange, Rule
from shardfold.operators.operator import Extra, Operator, aten, factors

NONE, MEAN = 0, 1
WIDE_BYTES = 4  # of an item of statistics, at least


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
    # soft targets, which hold weights and smoothing, add a sum; so do weights and smoothing else.
    more = call.has("weight") + (call.attribute("label_smoothing", 0.0) > 0)
    words = 3.0 if soft else 2.0 + more
    size = statistics_bytes(call.inputs[0])
    classes = [Exchange("all_reduce", "c", tuple(rows), n, size) for n in (1.0, words)]
    return call.rule(
        {"self": " ".join(full), "target": " ".join(full if soft else rows), "weight": "c"},
        " ".join(rows) if call.attribute("reduction", MEAN) == NONE else "",
        flops=6.0,
        resolved=frozenset({"c"}),
        exchanges=(*classes, *(() if soft else _count(call, rows))),
        saves=("self", "target", "weight"),
        entering=("target",),
        copied=("self",),
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
        saves=("self", "target", "weight"),
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
        copied=("self", "target") if call.op.kind == "aten.l1_loss" else (),  # their difference
        crossed=("self", "target") if call.op.kind == "aten.kl_div" else (),
        backward=1.0,
    )


def _kernels(work: LocalWork, phase: str) -> list[Kernel]:
    """Cross-entropy; with the classes in parts, passes in float32 around the sums of all parts."""
    wide, is_split = work.factor("c"), work.parts("c") > 1
    dtype, items = work.inputs[0].dtype, work.operand_items(0)
    lies = ".across" if len(work.inputs[0].shape) > 2 else ""  # classes are dim 1
    found = [Kernel(f"loss{lies}.{way(phase)}", dtype, (items / wide * ~is_split, wide))]
    if work.access.copies and phase != "backward":
        found.append(reordered(work.operand_bytes(0), dtype, across=True))
    if not is_split.any():
        return found
    size = 4.0 * items * is_split
    half = dtype in ("bfloat16", "float16")
    # Read in two bytes, written in four.
    cast = [memory_pass(1.5 * size, dtype, "cast")] if half else []
    strided = memory_pass(2.0 * size, "float32", "strided")
    passes = [*cast, strided, memory_pass(2.0 * size, "float32")]
    if phase != "backward":  # the largest; less that; exponentials; their sum
        sizes = (items / wide * is_split, wide)
        return [*found, *passes, *(Kernel("sum_rows", kind, sizes) for kind in (dtype, "float32"))]
    back = [memory_pass(1.5 * size, "float32", "cast")] if half else []
    return [*found, *passes, strided, *back]


def _extras(call: Call, access: Access) -> tuple[Extra, ...]:
    """The logarithms that it makes, and the count of what is not ignored."""
    item_bytes = call.inputs[0].item_bytes
    picked = not call.inputs[call.position("target")].is_floating
    counted = picked and call.attribute("reduction", MEAN) != NONE
    count = (Extra(-1, float(item_bytes)),) if counted else ()
    return (Extra(0, item_bytes), *_of_classes(item_bytes), *count)


def _of_classes(item_bytes: int) -> tuple[Extra, ...]:
    """What cross-entropy takes for a while, beside as much as its logits that it keeps.

    Backward on one device makes the gradient of the logarithms first. With the classes in parts,
    shares are made in float32: those of float32 logits are what is kept, and then the gradient.
    """
    whole = Extra(0, float(item_bytes), life="backward", factor="c", is_split=False)
    if item_bytes >= WIDE_BYTES:
        return (whole,)
    passing = Extra(0, float(WIDE_BYTES - item_bytes), life="forward", factor="c")
    return (whole, passing, Extra(0, float(WIDE_BYTES), life="backward", factor="c"))


def _count_of_rows(call: Call, access: Access) -> tuple[Extra, ...]:
    """Of a mean: what it was divided by."""
    is_mean = call.attribute("reduction", MEAN) != NONE
    return (Extra(-1, float(call.inputs[0].item_bytes)),) if is_mean else ()


def _difference(call: Call, access: Access) -> tuple[Extra, ...]:
    return (Extra(0, float(call.inputs[0].item_bytes)),)


def _smoothed_weights(call: Call) -> frozenset[str]:
    """Class weights together with label smoothing need whole classes."""
    both = call.has("weight") and call.attribute("label_smoothing", 0.0) > 0
    return frozenset({"c"} if both else ())


def _is_mean(op: Op) -> bool:
    return bool(op.attributes.get("reduction", MEAN) == MEAN)


def _is_even_mean(op: Op) -> bool:
    """With weights of classes the mean of one part counts for more than that of another."""
    return _is_mean(op) and not any(operand.name == "weight" for operand in op.operands)


PICKED = Operator(
    _nll,
    "own form",
    ranges=factors("c"),
    extras=_count_of_rows,
    is_mean=_is_even_mean,
    fuses="rows",
)
POINTWISE = Operator(_pointwise, "own form", is_mean=_is_mean, fuses="rows")

TABLE: Mapping[str, Operator] = {
    "aten.cross_entropy_loss": Operator(
        _cross_entropy,
        "own form",
        _smoothed_weights,
        ranges=factors("c"),
        kernels=_kernels,
        launched_as="aten.softmax",
        reads_in_order=True,
        remakes=("self",),
        extras=_extras,
        fuses="rows",
        is_mean=_is_even_mean,
        words={"c": "classes"},
    ),
    **aten("nll_loss nll_loss_nd nll_loss2d", PICKED),
    # The divisor is a result of its own: not run in parts.
    **aten("nll_loss_forward nll_loss2d_forward", Operator(_nll, "whole")),
    **aten(
        "mse_loss smooth_l1_loss huber_loss soft_margin_loss kl_div binary_cross_entropy "
        "binary_cross_entropy_with_logits",
        POINTWISE,
    ),
    "aten.l1_loss": replace(POINTWISE, remakes=("self", "target"), extras=_difference),
}
