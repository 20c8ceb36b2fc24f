"""Convolutions: batch, channels, groups, and space where parts align.

`b (g c) h w, (g n) c kh kw, (g n) -> b (g n) h w`: a group's inputs c are reduced, the kernel's
taps are never split but count as work. Splitting space exchanges a halo of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from shardfold.operators.call import Call
from shardfold.operators.kernels import Kernel, LocalWork, way
from shardfold.operators.notation import Rule
from shardfold.operators.operator import Operator
from shardfold.operators.windows import SPATIAL, halos, windows

# The windows that convolutions are measured with: taps and stride.
WINDOWS: Mapping[str, tuple[tuple[int, int], int]] = {
    "1x1": ((1, 1), 1),
    "1x1/2": ((1, 1), 2),
    "3x3": ((3, 3), 1),
    "3x3/2": ((3, 3), 2),
    "5x5": ((5, 5), 1),
    "1x7": ((1, 7), 1),
    "7x7/2": ((7, 7), 2),
    "16x16/16": ((16, 16), 16),
}


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


def _unsupported(call: Call) -> frozenset[str]:
    """Groups of a transposed convolution; space where padding is given by name."""
    if call.attribute("transposed", False) or "transpose" in call.op.kind:
        return frozenset({"g"})
    return frozenset(SPATIAL if isinstance(call.attribute("padding", 0), str) else ())


def _kernels(work: LocalWork, phase: str) -> list[Kernel]:
    stride = work.access.attributes.get("stride", 1)
    taps = work.inputs[1].shape[2:]
    window = _nearest_window(taps, stride if isinstance(stride, int) else stride[0])
    b, c, n = work.factor("b"), work.factor("c"), work.factor("n") * work.factor("g")
    side = np.sqrt(work.result_items(0) / (b * n))
    (high, wide), _ = WINDOWS[window]
    more = math.prod(taps) / (high * wide)
    found = [Kernel(f"conv.{window}.{way(phase)}", work.dtype, (b, c * more, n, side))]
    if phase == "backward" and 2 in work.trained:
        found.append(Kernel("sum_columns", work.dtype, (b * side * side, n)))
    return found


def _nearest_window(kernel: tuple[int, ...], stride: int) -> str:
    """The window that was measured with the same stride and the nearest number of taps."""
    taps = math.prod(kernel)

    def distance(name: str) -> tuple[bool, float]:
        (high, wide), step = WINDOWS[name]
        return (step != stride, abs(math.log(high * wide / taps)))

    return min(WINDOWS, key=distance)


CONVOLUTION = Operator(
    local="own form",
    unsupported=_unsupported,
    makes_result=True,
    makes_gradients=frozenset({"input", "weight"}),
    is_convolution=True,
)
TRANSPOSED = Operator(_transposed, "own form", _unsupported, is_convolution=True)

TABLE: Mapping[str, Operator] = {
    **{f"aten.conv{k}d": replace(CONVOLUTION, rule=_forward, kernels=_kernels) for k in (1, 2, 3)},
    **{f"aten.conv_transpose{k}d": TRANSPOSED for k in (1, 2, 3)},
    "aten.convolution": replace(CONVOLUTION, rule=_either),
}
