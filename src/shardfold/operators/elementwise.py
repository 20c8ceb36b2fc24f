"""Elementwise operators: every dim of the result is a factor, broadcast dims carry none.

What autograd keeps differs: some need their operands again, some their result, some nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardfold.operators.call import Call
from shardfold.operators.notation import Dim, Rule

KEEPS_OPERANDS = (
    "abs clamp clamp_min clamp_max cos erf gelu log log1p log2 mul div pow silu hardtanh "
    "hardsigmoid hardswish leaky_relu log_sigmoid mish relu6 sin softplus square "
    "addcmul addcdiv atan2 rsub true_divide float_power lerp fmod remainder xlogy maximum minimum"
).split()
KEEPS_RESULT = "celu elu exp expm1 relu reciprocal rsqrt selu sigmoid sqrt tanh threshold".split()
KEEPS_NOTHING = (
    "add sub neg where masked_fill eq ne lt le gt ge logical_and logical_or "
    "logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor __and__ __or__ "
    "__xor__ ceil floor round sign trunc floor_divide isnan isinf isfinite fill nan_to_num "
    "bernoulli ceil copy rand_like randn_like"
).split()
LINEAR = {"aten.add", "aten.sub", "aten.neg", "aten.mul", "aten.div"}
DROPOUTS = ("dropout", "native_dropout", "alpha_dropout", "feature_dropout")


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


def _keeps_operands(call: Call) -> Rule:
    linear = _passes_sums(call) if call.op.kind in LINEAR else ()
    scalar = call.op.kind in ("aten.mul", "aten.div") and len(call.inputs) == 1
    saves = () if scalar else tuple(range(len(call.inputs)))
    crossed = saves if call.op.kind == "aten.mul" else ()
    return broadcast(call, saves=saves, crossed=crossed, linear=linear, backward=1.0)


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
    return call.rule(
        {"self": " ".join(names), "weight": channel},
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


TABLE: Mapping[str, Callable[[Call], Rule]] = {
    "aten.prelu": _prelu,
    **{f"aten.{name}": _keeps_operands for name in KEEPS_OPERANDS},
    **{f"aten.{name}": _keeps_result for name in (*KEEPS_RESULT, *DROPOUTS)},
    **{f"aten.{name}": _keeps_nothing for name in KEEPS_NOTHING},
    **{f"aten.{name}": _cast for name in ("to", "_to_copy", "type_as", "clone", "contiguous")},
}
