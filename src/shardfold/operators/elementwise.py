"""Elementwise operators: every dim of the result is a factor, broadcast dims carry none.

What autograd keeps differs: some need their operands again, some their result, some nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from shardfold.graph import Op
from shardfold.operators.kernels import (
    Access,
    Kernel,
    KernelMaker,
    LocalWork,
    broadcast_sum,
    copied,
    elementwise_pass,
    memory_pass,
    pointwise,
)
from shardfold.operators.notation import Call, Dim, Rule
from shardfold.operators.operator import Extra, Operator, aten, keeps_means

SUMMANDS = {
    "aten.rsub": ("self", "other"),
    "aten.addcmul": ("self",),
    "aten.addcdiv": ("self",),
}
LINEAR = {"aten.add", "aten.sub", "aten.neg", "aten.mul", "aten.div"}


def broadcast(call: Call, **properties: object) -> Rule:
    """Operands align with the result from the right; a dim of size 1 is shared by all."""
    shape = call.results[0].shape
    sizes = {f"i{k}": size for k, size in enumerate(shape)}

    def dims(operand: tuple[int, ...]) -> tuple[Dim, ...]:
        offset = len(shape) - len(operand)
        return tuple(
            (f"i{k + offset}",) if size > 1 and size == shape[k + offset] else ()
            for k, size in enumerate(operand)
        )

    operands = tuple(dims(kind.shape) for kind in call.inputs)
    results = tuple(dims(kind.shape) for kind in call.results)
    return Rule(operands, results, sizes, **properties)  # type: ignore[arg-type]


def _passes_sums(call: Call) -> tuple[int, ...]:
    """Pending sums pass where all operands are summands of the result's own shape."""
    shape = call.results[0].shape
    tensors = len(call.inputs)
    if any(kind.shape != shape for kind in call.inputs) or not call.results[0].is_floating:
        return ()
    if call.op.kind == "aten.neg":
        return (0,)
    if call.op.kind in ("aten.mul", "aten.div"):
        return (0,) if tensors == 1 and call.op.operands[0].name == "self" else ()
    return (0, 1) if tensors == 2 else ()


def _summands(call: Call) -> set[int]:
    """The operands that no gradient needs: they are added to something, or taken from it."""
    names = SUMMANDS.get(call.op.kind, ())
    if call.op.kind == "aten.lerp" and not call.has("weight"):
        names = ("self", "end")
    return {k for k, operand in enumerate(call.op.operands) if operand.name in names}


def _keeps_operands(call: Call) -> Rule:
    linear = _passes_sums(call) if call.op.kind in LINEAR else ()
    scalar = call.op.kind in ("aten.mul", "aten.div") and len(call.inputs) == 1
    saves = () if scalar else tuple(sorted(set(range(len(call.inputs))) - _summands(call)))
    crossed = saves if call.op.kind == "aten.mul" else ()
    power = call.op.kind == "aten.pow" and call.has("exponent")
    kept = {"saves": saves, "crossed": crossed, "saves_results": power}
    return broadcast(call, **kept, linear=linear, backward=1.0)


def _keeps_result(call: Call) -> Rule:
    return broadcast(call, saves_results=True, backward=1.0)


def _keeps_nothing(call: Call) -> Rule:
    """But for what says where each gradient goes."""
    linear = _passes_sums(call) if call.op.kind in LINEAR else ()
    names = [operand.name for operand in call.op.operands]
    saves = tuple(k for k, name in enumerate(names) if name in ("condition", "mask"))
    return broadcast(call, saves=saves, linear=linear, backward=1.0)


def _prelu(call: Call) -> Rule:
    """The slopes belong to the channels, dim 1; a single slope is shared by all."""
    names = [f"i{k}" for k in range(len(call.shape("self")))]
    channel = names[1] if len(names) > 1 else "."
    slopes = channel if call.shape("weight") else ""
    return call.rule(
        {"self": " ".join(names), "weight": slopes},
        " ".join(names),
        sizes=dict(zip(names, call.shape("self"), strict=True)),
        saves=("self", "weight"),
        backward=1.0,
    )


def _cast(call: Call) -> Rule:
    """A second tensor is read for its dtype alone."""
    linear = (0,) if call.inputs[0].is_floating and call.results[0].is_floating else ()
    names = " ".join(f"i{k}" for k in range(len(call.inputs[0].shape)))
    return call.rule(
        {call.op.operands[0].name: names},
        names,
        linear=linear if len(call.inputs) == 1 else (),
        backward=1.0,
    )


def _multiplied(*, divides: bool) -> KernelMaker:
    """Backward, a pass for the gradient of each operand, and a sum where it was broadcast."""

    def make(work: LocalWork, phase: str) -> list[Kernel]:
        if phase != "backward":
            return pointwise(work, phase)
        whole = work.result_bytes(0)
        if len(work.inputs) == 1:
            return [elementwise_pass(work, 2.0 * whole, whole, strided=False, across=False)]
        found = []
        for k in work.trained:
            other = work.operand_bytes(1 - k) if k < 2 else whole
            strided = work.access.is_strided and bool(np.any(other < whole))
            strided |= work.access.is_gradient_strided
            across = work.access.is_across or work.access.is_gradient_across
            size, times = 2.0 * whole + other, 2 if divides and k == 1 else 1
            each = elementwise_pass(work, size, whole, strided=strided, across=across)
            found += [replace(each, dtype=work.results[0].dtype)] * times
            found += broadcast_sum(work, k)
            if work.inputs[k].dtype != work.results[0].dtype:
                found.append(memory_pass(work.operand_bytes(k) + whole, work.dtype, "cast"))
        return found

    return make


def _added(*, negates: bool = False) -> KernelMaker:
    """Gradients pass as they are: nothing to do but to sum what was broadcast."""

    def make(work: LocalWork, phase: str) -> list[Kernel]:
        if phase != "backward":
            return pointwise(work, phase)
        found = []
        for k in work.trained:
            found += broadcast_sum(work, k)
            if k == 1 and negates:
                found.append(memory_pass(2.0 * work.operand_bytes(k), work.dtype))
        return found

    return make


def _power(work: LocalWork, phase: str) -> list[Kernel]:
    """The base to one less, times the exponent, times the gradient: three passes."""
    if phase != "backward":
        return pointwise(work, phase)
    whole = work.result_bytes(0)
    return [memory_pass(times * whole, work.dtype) for times in (2.0, 2.0, 3.0)]


def _converted(work: LocalWork, phase: str) -> list[Kernel]:
    size = work.operand_bytes(0) + work.result_bytes(0)
    source = work.results[0] if phase == "backward" else work.inputs[0]
    return [memory_pass(size, source.dtype, "cast")]


def _mask(call: Call, access: Access) -> tuple[Extra, ...]:
    return () if access.is_idle else (Extra(-1, 1.0),)


def _channel_mask(call: Call, access: Access) -> tuple[Extra, ...]:
    """A factor for each sample and channel."""
    kind = call.results[0]
    return () if access.is_idle else (Extra(-1, kind.item_bytes, max(len(kind.shape) - 2, 0)),)


def _is_scaled_mean(op: Op, means: Sequence[bool]) -> bool:
    """A mean times what is no mean."""
    return sum(means) == 1


def _is_divided_mean(op: Op, means: Sequence[bool]) -> bool:
    """A mean by what is no mean, and not rounded."""
    return means[0] and not any(means[1:]) and op.attributes.get("rounding_mode") is None


def _gelu(work: LocalWork, phase: str) -> list[Kernel]:
    """Its gradient has an exponential and an error function to compute for every element."""
    found = pointwise(work, phase)
    is_exact = work.access.attributes.get("approximate", "none") == "none"
    if phase != "backward" or not is_exact:
        return found
    return [replace(k, family="gelu.backward") if k.family == "vector" else k for k in found]


def _dropped(work: LocalWork, phase: str) -> list[Kernel]:
    """Forward, bits are drawn for every element."""
    found = pointwise(work, phase)
    if phase == "backward" or work.access.is_compiled:
        return found
    return [replace(kernel, family="dropout.forward") for kernel in found]


OPERANDS = Operator(_keeps_operands, memory="pointwise")  # that need their operands again
RESULT = Operator(_keeps_result, memory="pointwise")  # that need their result again
NOTHING = Operator(_keeps_nothing, memory="pointwise")
ADDITION = replace(NOTHING, keeps_means=keeps_means)
CAST = Operator(_cast, memory="cast", keeps_means=keeps_means)
DROPOUT = Operator(
    _keeps_result,
    "own form",
    kernels=_dropped,
    saves_beside=True,
    extras=_mask,
    memory="dropout",
)

TABLE: Mapping[str, Operator] = {
    "aten.prelu": Operator(_prelu, memory="pointwise"),
    **aten(
        "abs celu clamp clamp_min clamp_max cos elu erf log log1p log2 silu hardtanh "
        "hardsigmoid hardswish leaky_relu log_sigmoid mish relu6 selu sin softplus square "
        "threshold addcmul addcdiv atan2 true_divide float_power lerp fmod remainder xlogy maximum "
        "minimum",
        OPERANDS,
    ),
    "aten.gelu": replace(OPERANDS, kernels=_gelu),
    "aten.mul": replace(OPERANDS, kernels=_multiplied(divides=False), keeps_means=_is_scaled_mean),
    "aten.div": replace(OPERANDS, kernels=_multiplied(divides=True), keeps_means=_is_divided_mean),
    "aten.pow": replace(OPERANDS, kernels=_power),
    "aten.rsub": replace(OPERANDS, kernels=_added(), keeps_means=keeps_means),
    **aten(
        "exp expm1 relu reciprocal rsqrt sigmoid sqrt tanh",
        RESULT,
    ),
    "aten.add": replace(ADDITION, kernels=_added(), hands_gradient_on=True),
    "aten.sub": replace(ADDITION, kernels=_added(negates=True), hands_gradient_on=True),
    "aten.neg": ADDITION,
    **aten(
        "where masked_fill eq ne lt le gt ge logical_and logical_or logical_not logical_xor "
        "bitwise_and bitwise_or bitwise_not bitwise_xor __and__ __or__ __xor__ ceil floor round "
        "sign trunc floor_divide isnan isinf isfinite fill nan_to_num copy",
        NOTHING,
    ),
    "aten.to": replace(CAST, kernels=_converted, left_out="same dtype"),
    "aten._to_copy": replace(
        CAST, kernels=_converted, launched_as="aten.to", left_out="same dtype"
    ),
    "aten.type_as": replace(CAST, left_out="same dtype"),
    "aten.clone": replace(CAST, kernels=copied, memory="copy"),
    "aten.contiguous": replace(CAST, kernels=copied, memory="copy if needed", left_out="in order"),
    "aten.dropout": replace(DROPOUT, left_out="idle"),
    **aten("native_dropout alpha_dropout", DROPOUT),
    "aten.feature_dropout": replace(DROPOUT, extras=_channel_mask),
    "aten.feature_alpha_dropout": replace(DROPOUT, rule=None),
    "aten.bernoulli": replace(NOTHING, local="own form"),
    # Random numbers: drawn by position, or refused by name.
    **aten(
        "multinomial normal uniform exponential poisson rrelu rrelu_with_noise random binomial "
        "cauchy geometric log_normal _sample_dirichlet _standard_gamma _fused_dropout "
        "fractional_max_pool2d fractional_max_pool3d",
        Operator(local="own form"),
    ),
}
