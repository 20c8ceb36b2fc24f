"""Convolution and pooling, and the sliding windows of both.

Sliding windows: where a spatial split of convolution or pooling aligns, and the halo it needs.

Output row i reads the input rows from `i * stride - padding` on, over `dilation * (kernel - 1) + 1`
rows. Where the input has exactly `stride` rows for each output row, a part of the outputs owns the
input rows of the same part, and reads `padding` rows before them and
`dilation * (kernel - 1) + 1 - stride - padding` rows after them: the halo.

    kernel 3, stride 1, padding 1: one row from each neighbour
    kernel 3, stride 2, padding 1: one row from the neighbour before
    kernel 2, stride 2, padding 0: none

Convolutions: batch, channels, groups, and space where parts align.

`b (g c) h w, (g n) c kh kw, (g n) -> b (g n) h w`: a group's inputs c are reduced, the kernel's
taps are never split but count as work. Splitting space exchanges a halo of rows.

Pooling: batch and channels split freely, space where windows align with parts.

`b c h w -> b c h w`, h and w being the output's; a window wider than its stride exchanges a halo.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardfold.operators.kernels import (
    Access,
    Kernel,
    KernelMaker,
    LocalWork,
    memory_pass,
    reordered,
    way,
)
from shardfold.operators.notation import Call, Exchange, Phase, Rule
from shardfold.operators.operator import UNKNOWN, Extra, Operator, aten

SPATIAL = ("t", "h", "w")


@dataclass(frozen=True, slots=True)
class Window:
    """One spatial dim of a sliding-window operator: sizes before and after, and its geometry."""

    factor: str
    before: int
    after: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def aligned(self) -> bool:
        """Whether parts of the output own equal parts of the input, and halos reach one part."""
        owns = self.before == self.stride * self.after
        return owns and self.after > 1 and max(self.halo) <= self.before // 2

    @property
    def halo(self) -> tuple[int, int]:
        """Input rows that a part reads from the parts before and after it."""
        reach = self.dilation * (self.kernel - 1) + 1
        return self.padding, max(reach - self.stride - self.padding, 0)

    @property
    def least(self) -> int:
        """The fewest output rows of a part whose neighbours' halo comes from that part alone."""
        return -(-max(self.halo) // self.stride)

    @property
    def input_dim(self) -> str:
        """The notation of the input's dim: none where parts would not align."""
        return self.factor if self.aligned else "."


def windows(call: Call, before: Sequence[int], kernel: Sequence[int]) -> tuple[Window, ...]:
    """The windows of a call, one for each entry of `kernel`; `before` is the input's shape."""
    rank = len(kernel)
    stride = each(call.attribute("stride") or kernel, rank)
    dilation = each(call.attribute("dilation", 1), rank)
    given = call.attribute("padding", 0)
    if isinstance(given, str):
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        padding = tuple(r // 2 if given == "same" else 0 for r in reach)
    else:
        padding = each(given, rank)
    after = call.results[0].shape[-rank:]
    return tuple(
        Window(*values)
        for values in zip(
            SPATIAL[-rank:], before[-rank:], after, kernel, stride, padding, dilation, strict=True
        )
    )


def each(value: Any, rank: int) -> tuple[int, ...]:
    """One number a dim: a single one holds for all."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * rank if len(values) == 1 else values


def halos(
    dims: Sequence[Window], lead: Sequence[str], sizes: Mapping[str, int], item_bytes: int
) -> tuple[Exchange, ...]:
    """The halo exchanges of every dim that can be split; the gradient's go the other way.

    A slab goes to each of two neighbours, so it is priced at half of the rows on both sides. Dims
    follow one another: where an earlier one is split too, the slab is longer by its halo, and so
    carries the corners.
    """
    phases: tuple[Phase, ...] = ("forward", "backward")
    found = []
    for number, dim in enumerate(dims):
        rows = sum(dim.halo)
        if not dim.aligned or not rows:
            continue
        over, words = list(lead), rows / 2
        for other in dims:
            if other is not dim and other.aligned:
                over.append(other.factor)
                words *= other.stride
            elif other is not dim:
                words *= other.before
        points = tuple(f for f in over if sizes.get(f, 1) > 1)
        longer = tuple(
            (other.factor, sum(other.halo) / other.stride)
            for other in dims[:number]
            if other.aligned and any(other.halo)
        )
        found += [
            Exchange(
                "halo",
                dim.factor,
                points,
                words,
                item_bytes,
                phase=phase,
                longer=longer,
                of=None if phase == "forward" else 0,
            )
            for phase in phases
        ]
    return tuple(found)


FEW = 8  # channels, in 16 bytes: fewer are no tile of a matrix unit
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
    """A convolution of each channel by itself is one of the vector units, with the window's taps.

    Of few groups, each is a convolution of its own on the matrix units.
    """
    if work.inputs[1].shape[1] == 1 and work.inputs[0].shape[1] > 1:
        found = [_depthwise(work, phase)]
    else:
        found = [_dense(work, phase)]
    if phase != "backward" and len(work.inputs) > 2:  # a pass of its own
        found.append(memory_pass(2.0 * work.result_bytes(0), work.dtype, "strided"))
    if phase != "backward" and work.access.copies:
        across = work.access.is_across
        found.append(reordered(work.operand_bytes(0), work.dtype, across=across))
    if phase == "backward" and 2 in work.trained:
        n = work.factor("n") * work.factor("g")
        found.append(Kernel("sum_columns", work.dtype, (work.result_items(0) / n, n)))
    return found


def _depthwise(work: LocalWork, phase: str) -> Kernel:
    b, n = work.factor("b"), work.factor("n") * work.factor("g")
    side = np.sqrt(work.result_items(0) / (b * n))
    taps = np.full_like(side, float(math.prod(work.inputs[1].shape[2:])))
    lies = ".last" if work.access.is_channels_last else ""
    return Kernel(f"depthwise{lies}.{way(phase)}", work.dtype, (b, n, side, taps))


def _dense(work: LocalWork, phase: str) -> Kernel:
    stride = work.access.attributes.get("stride", 1)
    taps = work.inputs[1].shape[2:]
    window = _nearest_window(taps, stride if isinstance(stride, int) else stride[-1])
    b, c, n = work.factor("b"), work.factor("c"), work.factor("n") * work.factor("g")
    side = np.sqrt(work.result_items(0) / (b * n))
    (high, wide), _ = WINDOWS[window]
    more = math.prod(taps) / (high * wide)
    lies = ".last" if work.access.is_channels_last else ""
    # Few channels stay few: they are another kernel's.
    sizes = (b, c, n * more, side) if work.inputs[1].shape[1] < FEW else (b, c * more, n, side)
    return Kernel(f"conv.{window}{lies}.{way(phase)}", work.dtype, sizes)


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

CONVOLUTIONS: Mapping[str, Operator] = {
    **{f"aten.conv{k}d": replace(CONVOLUTION, rule=_forward, kernels=_kernels) for k in (1, 2, 3)},
    **{f"aten.conv_transpose{k}d": TRANSPOSED for k in (1, 2, 3)},
    "aten.convolution": replace(CONVOLUTION, rule=_either),
}


def _pool_lead(call: Call, rank: int) -> list[str]:
    return ["b", "c"][rank + 2 - len(call.inputs[0].shape) :]


def _pool(call: Call, rank: int, *, space: bool, **properties: Any) -> Rule:
    """A pool with windows over the last `rank` dims; `space` says whether they may split."""
    before = call.inputs[0].shape
    kernel = each(call.attribute("kernel_size"), rank)
    dims = windows(call, before, kernel)
    lead = _pool_lead(call, rank)
    sizes = dict(zip(lead, before, strict=False)) | {d.factor: d.after for d in dims}
    split = [dim for dim in dims if space and dim.aligned]
    ins = [dim.factor if dim in split else "." for dim in dims]
    return call.rule(
        {call.op.operands[0].name: " ".join([*lead, *ins])},
        " ".join([*lead, *(dim.factor for dim in dims)]),
        sizes=sizes,
        flops=float(math.prod(kernel)),
        whole=frozenset(dim.factor for dim in dims if dim not in split),
        exchanges=halos(dims, lead, sizes, call.inputs[0].item_bytes) if space else (),
        least={dim.factor: dim.least for dim in dims},
        saves=(call.op.operands[0].name,),
        backward=1.0,
        **properties,
    )


def _max(rank: int) -> Callable[[Call], Rule]:
    # Autograd keeps where each maximum was; positions count in the whole plane, so an operator
    # that returns them does not split space.
    return lambda call: _pool(call, rank, space=len(call.results) == 1, saves_results=True)


def _average(rank: int) -> Callable[[Call], Rule]:
    return lambda call: _pool(call, rank, space=True, linear=(0,))


def _adaptive(call: Call, rank: int, *, mean: bool) -> Rule:
    """To size 1 it is a mean over the dim; to a divisor of the size, windows without overlap."""
    before, after = call.inputs[0].shape, call.results[0].shape
    lead = _pool_lead(call, rank)
    sizes = dict(zip(lead, before, strict=False))
    ins, outs, whole, flops = list(lead), list(lead), set(), 1.0
    for factor, n, m in zip(SPATIAL[-rank:], before[-rank:], after[-rank:], strict=True):
        sizes[factor] = n if m == 1 else m
        ins.append(factor if n % m == 0 else ".")
        outs.append("." if m == 1 else factor)
        flops *= 1.0 if m == 1 else n / m
        if not mean or n % m:
            whole.add(factor)
    return call.rule(
        {call.op.operands[0].name: " ".join(ins)},
        " ".join(outs),
        sizes=sizes,
        flops=flops,
        whole=frozenset(whole),
        linear=(0,) if mean else (),
        saves=() if mean and set(after[-rank:]) == {1} else (call.op.operands[0].name,),
        saves_results=not mean,
        backward=1.0,
    )


def _adaptive_pool(rank: int, *, mean: bool) -> Callable[[Call], Rule]:
    return lambda call: _adaptive(call, rank, mean=mean)


def _pool_unsupported(call: Call) -> frozenset[str]:
    """Space where windows are rounded up, or where an average does not count its padding."""
    padded = any(each(call.attribute("padding", 0), 1))
    uncounted = not call.attribute("count_include_pad", True) or bool(
        call.attribute("divisor_override", 0)
    )
    rounds_up = bool(call.attribute("ceil_mode", False))
    return frozenset(SPATIAL if rounds_up or (padded and uncounted) else ())


def _pool_kernels(kind: str) -> KernelMaker:
    def make(work: LocalWork, phase: str) -> list[Kernel]:
        size = work.operand_bytes(0) + work.result_bytes(0)
        return [memory_pass(size, work.dtype, f"{kind}_pool.{way(phase)}")]

    return make


def _places(call: Call, access: Access) -> tuple[Extra, ...]:
    """Where each maximum was, a result or not."""
    return (Extra(-1, 8.0),)


POOL = Operator(local="own form", unsupported=_pool_unsupported)
MAXIMUM = replace(POOL, saves_beside=True, extras=_places)


def _pools(rank: int) -> dict[str, Operator]:
    return {
        f"aten.max_pool{rank}d": replace(MAXIMUM, rule=_max(rank)),
        f"aten.max_pool{rank}d_with_indices": replace(MAXIMUM, rule=_max(rank)),
        f"aten.avg_pool{rank}d": replace(POOL, rule=_average(rank)),
        f"aten.adaptive_avg_pool{rank}d": replace(POOL, rule=_adaptive_pool(rank, mean=True)),
        f"aten.adaptive_max_pool{rank}d": replace(MAXIMUM, rule=_adaptive_pool(rank, mean=False)),
    }


def _resized(work: LocalWork, phase: str) -> list[Kernel]:
    """Every element of the larger plane reads neighbours in the other; equal ones are a copy."""
    if work.inputs[0].shape == work.results[0].shape:
        return [memory_pass(2.0 * work.result_bytes(0), work.dtype)]
    size = 2.0 * np.maximum(work.operand_bytes(0), work.result_bytes(0))
    return [memory_pass(size, work.dtype, f"resize.{way(phase)}")]


# Windows in a plane have been measured, others have not.
PLANES = {kind: replace(each, keeps_channels=True) for kind, each in _pools(2).items()}
POOLS: Mapping[str, Operator] = {
    **_pools(1),
    **PLANES,
    **_pools(3),
    "aten.max_pool2d": replace(PLANES["aten.max_pool2d"], kernels=_pool_kernels("max")),
    "aten.avg_pool2d": replace(
        PLANES["aten.avg_pool2d"], kernels=_pool_kernels("avg"), launched_as="aten.max_pool2d"
    ),
    "aten.adaptive_avg_pool2d": replace(
        PLANES["aten.adaptive_avg_pool2d"], kernels=_pool_kernels("avg")
    ),
}

# Their rules are found by experiment.
RESIZED = {
    **aten("upsample_nearest2d", replace(UNKNOWN, keeps_channels=True)),
    **aten("upsample_linear1d upsample_trilinear3d", replace(UNKNOWN, kernels=_resized)),
    **aten(
        "upsample_bilinear2d upsample_bicubic2d",
        replace(UNKNOWN, kernels=_resized, keeps_channels=True),
    ),
}

TABLE: Mapping[str, Operator] = {**CONVOLUTIONS, **POOLS, **RESIZED}
