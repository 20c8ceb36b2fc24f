"""Convolutions: batch, channels, groups, and space where parts align.

`b (g c) h w, (g n) c kh kw, (g n) -> b (g n) h w`: a group's inputs c are reduced, the kernel's
taps are never split but count as work. Splitting space exchanges a halo of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardfold.operators.call import Call
from shardfold.operators.notation import Rule
from shardfold.operators.windows import SPATIAL, halos, windows


def _merged(sizes: Mapping[str, int], *factors: str) -> str:
    """The notation of one dim of several factors; those of size 1 are left out."""
    return f"({' '.join(f for f in factors if sizes[f] > 1)})"


def _lead(call: Call, rank: int) -> str:
    """The batch dim, which a single example lacks."""
    return "b " if len(call.shape("input")) == rank + 2 else ""


def _forward(call: Call) -> Rule:
    before, weight = call.shape("input"), call.shape("weight")
    kernel = weight[2:]
    groups = call.attribute("groups", 1)
    dims = windows(call, before, kernel)
    sizes = {"g": groups, "c": weight[1], "n": weight[0] // groups}
    sizes |= {dim.factor: dim.after for dim in dims}
    lead = _lead(call, len(kernel))
    if lead:
        sizes["b"] = before[0]
    outs = _merged(sizes, "g", "n")
    taps = tuple(f"k{f}" for f in SPATIAL[-len(kernel) :])
    whole = {dim.factor for dim in dims if not dim.aligned}
    exchanges = halos(dims, ("b", "g", "c"), sizes, call.inputs[0].item_bytes)
    return call.rule(
        {
            "input": f"{lead}{_merged(sizes, 'g', 'c')} {' '.join(d.input_dim for d in dims)}",
            "weight": f"{outs} c {' '.join(taps)}",
            "bias": outs,
        },
        f"{lead}{outs} {' '.join(dim.factor for dim in dims)}",
        sizes=sizes,
        engine="matrix",
        flops=2.0,
        whole=frozenset({*taps, *whole}),
        exchanges=exchanges,
        least={dim.factor: dim.least for dim in dims},
        saves=("input", "weight"),
        crossed=("input", "weight"),
    )


def _transposed(call: Call) -> Rule:
    """Each input point spreads over a window of outputs: space stays whole."""
    before, weight = call.shape("input"), call.shape("weight")
    groups = call.attribute("groups", 1)
    space = SPATIAL[-len(weight[2:]) :]
    sizes = {"g": groups, "c": weight[0] // groups, "n": weight[1]}
    lead = _lead(call, len(space))
    if lead:
        sizes["b"] = before[0]
    ins, outs = _merged(sizes, "g", "c"), _merged(sizes, "g", "n")
    taps = tuple(f"k{f}" for f in space)
    return call.rule(
        {
            "input": f"{lead}{ins} {' '.join(space)}",
            "weight": f"{ins} n {' '.join(taps)}",
            "bias": outs,
        },
        f"{lead}{outs} {' '.join('.' for _ in space)}",
        sizes=sizes,
        engine="matrix",
        flops=2.0,
        whole=frozenset({*taps, *space}),
        saves=("input", "weight"),
        crossed=("input", "weight"),
    )


def _either(call: Call) -> Rule:
    return _transposed(call) if call.attribute("transposed", False) else _forward(call)


TABLE: Mapping[str, Callable[[Call], Rule]] = {
    "aten.conv1d": _forward,
    "aten.conv2d": _forward,
    "aten.conv3d": _forward,
    "aten.conv_transpose1d": _transposed,
    "aten.conv_transpose2d": _transposed,
    "aten.conv_transpose3d": _transposed,
    "aten.convolution": _either,
}
