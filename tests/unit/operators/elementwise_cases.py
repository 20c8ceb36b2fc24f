"""Calls of every elementwise operator, with broadcasting where it takes several tensors."""

from __future__ import annotations

import torch

from .cases import bools, case, ints, normal, positive
from .oracle import Case

UNARY = (
    "abs cos erf gelu log log1p log2 silu hardtanh hardsigmoid hardswish leaky_relu log_sigmoid "
    "mish relu6 sin softplus square celu elu exp expm1 relu reciprocal rsqrt selu sigmoid sqrt "
    "tanh neg logical_not ceil floor round sign trunc isnan isinf isfinite nan_to_num clone "
    "contiguous _to_copy"
)
BINARY = (
    "mul.Tensor div.Tensor pow.Tensor_Tensor atan2 rsub.Tensor true_divide.Tensor "
    "float_power.Tensor_Tensor fmod.Tensor remainder.Tensor xlogy.Tensor add.Tensor sub.Tensor "
    "maximum minimum eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor logical_and "
    "logical_or logical_xor"
)
BITS = (
    "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor __and__.Tensor __or__.Tensor "
    "__xor__.Tensor floor_divide"
)


def elementwise() -> list[Case]:
    x, shape = positive(4, 6, 3), (4, 6, 3)
    cases = [case(name, {"self": positive(*shape)}) for name in UNARY.split()]
    for name in BINARY.split():
        cases.append(case(name, {"self": positive(*shape), "other": positive(*shape)}))
        cases.append(
            case(name, {"self": positive(6, 1), "other": positive(4, 1, 3)}, label="broadcast")
        )
    for each in cases:
        if each.kind in ("aten.pow", "aten.float_power"):
            each.arguments["exponent"] = each.arguments.pop("other")
    for name in BITS.split():
        cases.append(case(name, {"self": ints(8, 4, 6), "other": ints(7, 6) + 1}))
    return cases + _scalars(x) + _several(x) + _dropouts(x)


def _scalars(x: torch.Tensor) -> list[Case]:
    return [
        case("mul.Tensor", {"self": x, "other": 2.0}, label="scalar"),
        case("div.Tensor", {"self": x, "other": 2.0}, label="scalar"),
        case("add.Tensor", {"self": x, "other": 2.0}, label="scalar"),
        case("rsub.Scalar", {"self": x, "other": 2.0}, label="scalar"),
        case("pow.Tensor_Scalar", {"self": x, "exponent": 2}, label="scalar"),
        case("pow.Scalar", {"self": 2.0, "exponent": x}, label="of scalar"),
        case("div.Tensor", {"self": torch.tensor(3.0).double(), "other": x}, label="of scalar"),
        case("clamp", {"self": x, "min": 0.3}),
        case("clamp_min", {"self": x, "min": 0.3}),
        case("clamp_max", {"self": x, "max": 0.3}),
        case("threshold", {"self": x, "threshold": 0.3, "value": 0.0}),
        case("bitwise_not", {"self": bools(4, 6)}),
        case("fill.Scalar", {"self": x, "value": 2.0}),
        case("to.dtype", {"self": x, "dtype": torch.float32}),
    ]


def _several(x: torch.Tensor) -> list[Case]:
    thirds = {"self": x, "tensor1": positive(6, 1), "tensor2": positive(3)}
    return [
        case("addcmul", thirds),
        case("addcdiv", thirds),
        case("lerp.Tensor", {"self": x, "end": positive(4, 6, 3), "weight": positive(4, 6, 3)}),
        case("lerp.Scalar", {"self": x, "end": positive(4, 6, 3), "weight": 0.3}, label="scalar"),
        case("where.self", {"condition": bools(6, 1), "self": x, "other": normal(4, 6, 3)}),
        case("masked_fill.Scalar", {"self": x, "mask": bools(6, 1), "value": -1.0}),
        case("copy", {"self": x, "src": normal(6, 3)}, fixed=("self", "src")),
        case("type_as", {"self": normal(4, 6), "other": normal(2, 3, 6)}),
        case("type_as", {"self": normal(4, 6), "other": normal(6, 3, 5)}, label="unlike"),
        case("prelu", {"self": normal(4, 6, 3), "weight": normal(6)}),
        case("prelu", {"self": normal(4, 6, 3), "weight": normal(1)}, label="one slope"),
        case("prelu", {"self": normal(4, 6, 3), "weight": normal()}, label="no dim"),
        case("prelu", {"self": normal(4, 6, 6), "weight": normal(6)}, label="square"),
    ]


def _dropouts(x: torch.Tensor) -> list[Case]:
    given = {"input": x, "p": 0.5, "train": False}
    names = ("dropout", "native_dropout", "alpha_dropout", "feature_dropout")
    drawn = {**given, "train": True}
    return [
        *(case(name, given) for name in names),
        case("dropout", drawn, same_values=False, label="drawn"),
        case("native_dropout", drawn, same_values=False, label="drawn"),
        case("bernoulli", {"self": bools(4, 6).double()}),
        *(case(name, {"self": x}, same_values=False) for name in ("rand_like", "randn_like")),
    ]
