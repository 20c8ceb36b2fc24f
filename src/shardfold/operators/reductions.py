"""Reductions: sums and means leave a partial sum where the reduced factor is split.

`i0 i1 i2 -> i0 i2`. Maxima, products and the like have no pending form: their dims stay whole.
A mean is a sum divided by a known count. A running sum keeps its dim, whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardfold.operators.call import Call
from shardfold.operators.elementwise import broadcast
from shardfold.operators.norms import statistics_bytes
from shardfold.operators.notation import Exchange, Rule


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
    """A sum of a function of each element: adds up over parts, but not over pending sums."""
    return _reduce(call)


def _whole(call: Call) -> Rule:
    kept = (call.op.operands[0].name,) if call.results[0].is_floating else ()
    return _reduce(call, whole=_names_of_reduced(call), saves=kept)


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


WHOLE = [
    "amax",
    "amin",
    "aminmax",
    "prod",
    "any",
    "all",
    "argmax",
    "argmin",
    "median",
    "nanmedian",
    "mode",
    "var",
    "std",
    "var_mean",
    "std_mean",
    "norm",
    "linalg_vector_norm",
    "linalg_norm",
    "frobenius_norm",
]
RUNNING = ["cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"]

TABLE: Mapping[str, Callable[[Call], Rule]] = {
    "aten.sum": _additive,
    "aten.mean": _additive,
    "aten.nansum": _counted,
    "aten.count_nonzero": _counted,
    "aten.max": _extremum,
    "aten.min": _extremum,
    "aten.logsumexp": _logsumexp,
    **{f"aten.{name}": _whole for name in WHOLE},
    **{f"aten.{name}": _running for name in RUNNING},
}
