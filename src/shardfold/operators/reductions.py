"""Reductions: sums and means leave a partial sum where the reduced factor is split.

`i0 i1 i2 -> i0 i2`. Maxima, products and the like have no pending form: their dims stay whole.
A mean is a sum divided by a known count. A running sum keeps its dim, whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardfold.operators.elementwise import broadcast
from shardfold.operators.kernels import (
    Access,
    Kernel,
    KernelMaker,
    LocalWork,
    memory_pass,
    sum_kernel,
)
from shardfold.operators.norms import statistics_bytes
from shardfold.operators.notation import Call, Exchange, Rule
from shardfold.operators.operator import Extra, Operator, aten, keeps_means


def _reduced_dims(call: Call) -> frozenset[int]:
    """The dims that the operator reduces; none named means all."""
    rank = len(call.inputs[0].shape)
    given = call.attribute("dim", ())
    dims = (given,) if isinstance(given, int) else tuple(given)
    return frozenset(k % rank for k in dims) if dims and rank else frozenset(range(rank))


def _reduce(call: Call, **properties: Any) -> Rule:
    names = [f"i{k}" for k in range(len(call.inputs[0].shape))]
    gone = _reduced_dims(call)
    keep = call.attribute("keepdim", False)
    after = ["." if k in gone else n for k, n in enumerate(names) if keep or k not in gone]
    return call.rule(
        {call.op.operands[0].name: " ".join(names)}, " ".join(after), backward=1.0, **properties
    )


def _names_of_reduced(call: Call) -> frozenset[str]:
    return frozenset(f"i{k}" for k in _reduced_dims(call))


def _additive(call: Call) -> Rule:
    floating = call.inputs[0].is_floating and call.results[0].is_floating
    return _reduce(call, linear=(0,) if floating else ())


def _counted(call: Call) -> Rule:
    """A sum of a function of each element: adds up over shards, but not over partial sums."""
    return _reduce(call)


def _whole(call: Call) -> Rule:
    keeps = call.results[0].is_floating and not _gives_positions(call)
    kept = (call.op.operands[0].name,) if keeps else ()
    return _reduce(call, whole=_names_of_reduced(call), saves=kept)


def _gives_positions(call: Call) -> bool:
    return len(call.results) == 2 and not call.results[1].is_floating


def _positions(call: Call, access: Access) -> tuple[Extra, ...]:
    """Where a value was taken from: what its gradient needs."""
    return (Extra(-1, 8.0),) if _gives_positions(call) else ()


def _extremum(call: Call) -> Rule:
    """Maximum or minimum: of two tensors, of one dim (with positions), or of all."""
    if call.has("other"):
        return broadcast(call, saves=(0, 1), backward=1.0)
    return _whole(call)


def _logsumexp(call: Call) -> Rule:
    """Maximum and sum of each row are all-reduced where the dim is split."""
    gone = sorted(_names_of_reduced(call))
    rows = tuple(f"i{k}" for k in range(len(call.inputs[0].shape)) if k not in _reduced_dims(call))
    return _reduce(
        call,
        flops=4.0,
        resolved=frozenset(gone),
        exchanges=tuple(
            Exchange("all_reduce", factor, rows, item_bytes=statistics_bytes(call.inputs[0]))
            for factor in gone
            for _ in range(2)
        ),
        saves=(call.op.operands[0].name,),
        saves_results=True,
    )


def _running(call: Call) -> Rule:
    names = [f"i{k}" for k in range(len(call.inputs[0].shape))]
    if not names:
        return call.undescribed(backward=1.0)
    name = names[call.attribute("dim", 0) % len(names)]
    is_sum = call.op.kind == "aten.cumsum"
    return call.rule(
        {call.op.operands[0].name: " ".join(names)},
        " ".join(names),
        whole=frozenset({name}),
        linear=(0,) if is_sum and call.inputs[0].is_floating else (),
        saves=() if is_sum else (call.op.operands[0].name,),
        saves_results=not is_sum,
        backward=1.0,
    )


def _kernels(*, is_mean: bool) -> KernelMaker:
    """Forward a sum; backward a mean divides what is broadcast, a sum only broadcasts."""

    def make(work: LocalWork, phase: str) -> list[Kernel]:
        whole, part = work.operand_items(0), work.result_items(0)
        if phase == "backward":
            spread = memory_pass(2.0 * work.operand_bytes(0), work.dtype, "strided")
            return [spread] if is_mean else []
        shape, after = work.inputs[0].shape, work.results[0].shape
        keeps_last = bool(after) and shape[-1] == after[-1] and len(shape) > 1
        return [sum_kernel(work.dtype, whole, part, keeps_last)]

    return make


def _but_the_first(call: Call) -> frozenset[str]:
    """Of several reduced dims, one may be in parts."""
    return frozenset(sorted(_names_of_reduced(call))[1:])


SUM = Operator(
    _additive,
    fuses="reduction",
    kernels=_kernels(is_mean=False),
    launched_as="aten.mean",
    keeps_means=keeps_means,
)

TABLE: Mapping[str, Operator] = {
    "aten.sum": SUM,
    "aten.mean": replace(
        SUM, local="own form", kernels=_kernels(is_mean=True), is_mean=lambda op: True
    ),
    "aten.nansum": Operator(_counted, fuses="reduction"),
    "aten.count_nonzero": Operator(_counted, fuses="reduction"),
    **aten("max min", Operator(_extremum, fuses="reduction", extras=_positions)),
    "aten.logsumexp": Operator(_logsumexp, "own form", _but_the_first, fuses="reduction"),
    **aten(
        "amax amin aminmax prod any all argmax argmin median nanmedian mode var std var_mean "
        "std_mean norm linalg_vector_norm linalg_norm frobenius_norm",
        Operator(_whole, fuses="reduction", extras=_positions),
    ),
    **aten("cumsum cumprod cummax cummin logcumsumexp", Operator(_running)),
}
