"""Everyday functions of torch, and for each the splits that are possible, said beforehand.

A letter is a factor that can be split: a device with a part of it computes, by the same function,
a part of the result, or a summand of it, or its share of a mean, or all that the others lack is a
small exchange of sums. A dot is a dim that must be whole, a number a count that stays in place:
`(a 3)` is a dim of three rows for each point of a, `(3 a)` has all points of a three times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Everyday:
    """One function on tensors of these shapes, and how it can be split."""

    name: str
    function: Callable[..., Any]
    shapes: tuple[Shape, ...]
    splits: str
    ints: tuple[int, ...] = ()  # positions of operands that are indices
    high: int = 6  # indices are below this
    bools: tuple[int, ...] = ()
    fixed: tuple[int, ...] = ()  # positions of operands that torch gives no gradient
    draw: str = "normal"
    is_coarse: bool = False  # it rounds to float32

    def __str__(self) -> str:
        return self.name


LISTED: list[Everyday] = []


def add(name: str, function: Callable[..., Any], *shapes: Shape, splits: str, **more: Any) -> None:
    LISTED.append(Everyday(name, function, shapes, splits, **more))


SQUARE = (8, 12)
CUBE = (8, 6, 12)
IMAGE = (8, 6, 12, 16)


def pointwise() -> None:
    functions = (
        "abs acos acosh asin asinh atan atanh ceil cos cosh deg2rad digamma erf erfc erfinv exp "
        "exp2 expm1 floor frac lgamma log log10 log1p log2 logit nan_to_num neg positive rad2deg "
        "reciprocal round rsqrt sgn sigmoid sign sin sinc sinh sqrt square tan tanh trunc "
        "isfinite isnan logical_not"
    )
    for name in functions.split():
        above = name in ("acosh",)
        function = getattr(torch, name)
        called = (lambda x, f=function: f(x + 1.5)) if above else function
        add(f"torch.{name}", called, SQUARE, splits="a b -> a b", draw="positive")
    activations = (
        "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu "
        "relu6 selu silu softplus softshrink softsign tanhshrink"
    )
    for name in activations.split():
        add(f"F.{name}", getattr(F, name), SQUARE, splits="a b -> a b")
    add("F.threshold", lambda x: F.threshold(x, 0.1, 2.0), SQUARE, splits="a b -> a b")
    add("F.prelu", F.prelu, IMAGE, (6,), splits="a b c d, b -> a b c d")
    add("F.glu", F.glu, SQUARE, splits="a (2 b) -> a b")
    add("torch.clamp", lambda x: x.clamp(-1, 1), SQUARE, splits="a b -> a b")
    add("Tensor.clip", lambda x: x.clip(min=0.2), SQUARE, splits="a b -> a b")
    add("torch.special.i0e", torch.special.i0e, SQUARE, splits="a b -> a b")
    add("torch.special.entr", torch.special.entr, SQUARE, splits="a b -> a b", draw="positive")
    add("torch.special.ndtr", torch.special.ndtr, SQUARE, splits="a b -> a b")
    add(
        "torch.special.xlog1py",
        torch.special.xlog1py,
        SQUARE,
        SQUARE,
        splits="a b, a b -> a b",
        draw="positive",
    )
    add("Tensor.float", lambda x: x.float(), SQUARE, splits="a b -> a b", is_coarse=True)
    add("Tensor.to", lambda x: x.to(torch.float32), SQUARE, splits="a b -> a b", is_coarse=True)
    add("Tensor.clone", lambda x: x.clone(), SQUARE, splits="a b -> a b")
    binary = (
        "add sub mul div maximum minimum fmax fmin hypot atan2 copysign logaddexp logaddexp2 "
        "float_power pow xlogy eq ne lt le gt ge logical_and logical_or logical_xor"
    )
    for name in binary.split():
        add(
            f"torch.{name}",
            getattr(torch, name),
            SQUARE,
            SQUARE,
            splits="a b, a b -> a b",
            draw="positive",
        )
    add(
        "torch.heaviside",
        torch.heaviside,
        SQUARE,
        SQUARE,
        splits="a b, a b -> a b",
        fixed=(0, 1),
    )
    add("torch.mul, broadcast", torch.mul, CUBE, (6, 1), splits="a b c, b . -> a b c")
    add("torch.remainder", lambda x: torch.remainder(x, 0.7), SQUARE, splits="a b -> a b")
    add("torch.fmod", lambda x: torch.fmod(x, 0.7), SQUARE, splits="a b -> a b")
    add(
        "torch.floor_divide",
        lambda x: torch.floor_divide(x, 0.3),
        SQUARE,
        splits="a b -> a b",
        fixed=(0,),
    )
    add(
        "torch.where",
        torch.where,
        SQUARE,
        SQUARE,
        SQUARE,
        splits="a b, a b, a b -> a b",
        bools=(0,),
    )
    add("torch.lerp", lambda x, y: torch.lerp(x, y, 0.3), SQUARE, SQUARE, splits="a b, a b -> a b")
    add("torch.addcmul", torch.addcmul, SQUARE, SQUARE, SQUARE, splits="a b, a b, a b -> a b")
    add(
        "torch.addcdiv",
        torch.addcdiv,
        SQUARE,
        SQUARE,
        SQUARE,
        splits="a b, a b, a b -> a b",
        draw="positive",
    )
    add(
        "Tensor.masked_fill",
        lambda x, m: x.masked_fill(m, -1.0),
        SQUARE,
        SQUARE,
        splits="a b, a b -> a b",
        bools=(1,),
    )
    add(
        "Tensor.type_as",
        lambda x, y: x.float().type_as(y),
        SQUARE,
        (3, 5),
        is_coarse=True,
        splits="a b, . . -> a b",
    )
    add("torch.isclose", torch.isclose, SQUARE, SQUARE, splits="a b, a b -> a b")
    add("torch.polar", torch.polar, SQUARE, SQUARE, splits="a b, a b -> a b")
    add("torch.complex", torch.complex, SQUARE, SQUARE, splits="a b, a b -> a b")
    add(
        "torch.real",
        lambda x, y: torch.complex(x, y).real,
        SQUARE,
        SQUARE,
        splits="a b, a b -> a b",
    )
    add(
        "torch.angle",
        lambda x, y: torch.complex(x, y).angle(),
        SQUARE,
        SQUARE,
        splits="a b, a b -> a b",
    )
    add(
        "torch.conj",
        lambda x, y: torch.complex(x, y).conj() * 1j,
        SQUARE,
        SQUARE,
        splits="a b, a b -> a b",
    )


def reductions() -> None:
    sums = {
        "sum": torch.sum,
        "mean": torch.mean,
        "nansum": torch.nansum,
        "logsumexp": torch.logsumexp,
    }
    for name, function in sums.items():
        add(f"torch.{name}", lambda x, f=function: f(x, 1), CUBE, splits="a b c -> a c")
    whole = (
        "amax amin prod var std norm median cumsum cumprod logcumsumexp argmax argmin all any mode "
        "cummax max min var_mean std_mean"
    )
    functions = {name: getattr(torch, name) for name in whole.split()}
    for name in functions:
        same = "a . c" if name.startswith(("cum", "logcum")) else "a c"
        two = name in ("median", "mode", "cummax", "max", "min", "var_mean", "std_mean")
        after = f"{same}, {same}" if two else same
        call = (
            (lambda x: torch.norm(x, dim=1))
            if name == "norm"
            else lambda x, f=functions[name]: f(x, 1)
        )
        add(f"torch.{name}", call, CUBE, splits=f"a . c -> {after}")
    add("torch.count_nonzero", lambda x: torch.count_nonzero(x, 1), CUBE, splits="a b c -> a c")
    add("torch.sum, of all", torch.sum, CUBE, splits="a b c -> ")
    add("torch.mean, of all", torch.mean, CUBE, splits="a b c -> ")
    add(
        "torch.linalg.vector_norm",
        lambda x: torch.linalg.vector_norm(x, dim=1),
        CUBE,
        splits="a . c -> a c",
    )
    add("torch.trace", lambda x: x.diagonal(0, 1, 2).sum(-1), (8, 6, 6), splits="a . . -> a")
    add("F.softmax", lambda x: F.softmax(x, 1), CUBE, splits="a b c -> a b c")
    add("F.log_softmax", lambda x: F.log_softmax(x, 1), CUBE, splits="a b c -> a b c")
    add("F.softmin", lambda x: F.softmin(x, 1), CUBE, splits="a b c -> a b c")
    add("F.normalize", lambda x: F.normalize(x, dim=1), CUBE, splits="a . c -> a . c")
    add(
        "F.layer_norm",
        lambda x, w, b: F.layer_norm(x, (12,), w, b),
        CUBE,
        (12,),
        (12,),
        splits="a b c, c, c -> a b c",
    )
    add("F.rms_norm", lambda x, w: F.rms_norm(x, (12,), w), CUBE, (12,), splits="a b c, c -> a b c")
    add(
        "F.group_norm",
        lambda x, w, b: F.group_norm(x, 2, w, b),
        IMAGE,
        (6,),
        (6,),
        splits="a . c d, ., . -> a . c d",
    )
    add("F.instance_norm", F.instance_norm, IMAGE, splits="a b c d -> a b c d")
    add(
        "F.batch_norm",
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        IMAGE,
        (6,),
        (6,),
        splits="a b c d, b, b -> a b c d",
    )
    add(
        "F.local_response_norm",
        lambda x: F.local_response_norm(x, 2),
        IMAGE,
        splits="a . c d -> a . c d",
    )
    add("torch.quantile", lambda x: torch.quantile(x, 0.3, 1), CUBE, splits="a . c -> a c")
    add("torch.topk", lambda x: torch.topk(x, 3, 1), CUBE, splits="a . c -> a . c, a . c")
    add("torch.sort", lambda x: torch.sort(x, 1), CUBE, splits="a . c -> a . c, a . c")
    add("torch.argsort", lambda x: torch.argsort(x, 1), CUBE, splits="a . c -> a . c")
    add("torch.kthvalue", lambda x: torch.kthvalue(x, 2, 1), CUBE, splits="a . c -> a c, a c")
    add("torch.renorm", lambda x: torch.renorm(x, 2, 0, 1.0), CUBE, splits="a . . -> a . .")
    add("torch.diff", lambda x: torch.diff(x, dim=1), CUBE, splits="a . c -> a . c")
    add("torch.trapezoid", lambda x: torch.trapezoid(x, dim=1), CUBE, splits="a . c -> a c")


def views() -> None:
    add("Tensor.T", lambda x: x.T, SQUARE, splits="a b -> b a")
    add("Tensor.mT", lambda x: x.mT, CUBE, splits="a b c -> a c b")
    add("torch.t", torch.t, SQUARE, splits="a b -> b a")
    add("Tensor.adjoint", lambda x: x.adjoint(), CUBE, splits="a b c -> a c b")
    add("torch.transpose", lambda x: x.transpose(0, 2), CUBE, splits="a b c -> c b a")
    add("torch.swapaxes", lambda x: x.swapaxes(0, 2), CUBE, splits="a b c -> c b a")
    add("torch.swapdims", lambda x: x.swapdims(0, 2), CUBE, splits="a b c -> c b a")
    add("torch.permute", lambda x: x.permute(2, 0, 1), CUBE, splits="a b c -> c a b")
    add("torch.movedim", lambda x: x.movedim(0, 2), CUBE, splits="a b c -> b c a")
    add("torch.moveaxis", lambda x: x.moveaxis(0, 2), CUBE, splits="a b c -> b c a")
    add("Tensor.view", lambda x: x.view(48, 12), CUBE, splits="a b c -> (a b) c")
    add("torch.reshape", lambda x: x.reshape(8, 72), CUBE, splits="a b c -> a (b c)")
    add("torch.flatten", lambda x: x.flatten(1), CUBE, splits="a b c -> a (b c)")
    add("torch.ravel", torch.ravel, CUBE, splits="a b c -> (a b c)")
    add("torch.unflatten", lambda x: x.unflatten(1, (4, 2)), (12, 8), splits="a (b c) -> a b c")
    add("torch.squeeze", lambda x: x.squeeze(1), (8, 1, 12), splits="a . b -> a b")
    add("torch.unsqueeze", lambda x: x.unsqueeze(1), SQUARE, splits="a b -> a . b")
    add("Tensor.expand", lambda x: x.expand(8, 6, 12), (8, 1, 12), splits="a . c -> a b c")
    add(
        "Tensor.expand_as",
        lambda x, y: x.expand_as(y),
        (8, 1, 12),
        CUBE,
        splits="a . c, . . . -> a b c",
    )
    add(
        "torch.broadcast_to",
        lambda x: x.broadcast_to(8, 6, 12),
        (8, 1, 12),
        splits="a . c -> a b c",
    )
    add(
        "torch.broadcast_tensors",
        torch.broadcast_tensors,
        (8, 1),
        (1, 12),
        splits="a ., . b -> a b, a b",
    )
    add("Tensor.view_as", lambda x, y: x.view_as(y), CUBE, (48, 12), splits="a b c, . . -> (a b) c")
    add("Tensor.repeat", lambda x: x.repeat(1, 3), SQUARE, splits="a b -> a (3 b)")
    add("torch.tile", lambda x: x.tile(2, 3), SQUARE, splits="a b -> (2 a) (3 b)")
    add(
        "torch.repeat_interleave",
        lambda x: x.repeat_interleave(4, 1),
        CUBE,
        splits="a b c -> a (b 4) c",
    )
    add(
        "torch.cat", lambda x, y: torch.cat([x, y], 1), SQUARE, SQUARE, splits="a b, a b -> a (2 b)"
    )
    add(
        "torch.cat, unequal",
        lambda x, y: torch.cat([x, y], 1),
        SQUARE,
        (8, 6),
        splits="a ., a . -> a .",
    )
    add(
        "torch.concat",
        lambda x, y: torch.concat([x, y], 0),
        SQUARE,
        SQUARE,
        splits="a b, a b -> (2 a) b",
    )
    add(
        "torch.stack",
        lambda x, y: torch.stack([x, y], 1),
        SQUARE,
        SQUARE,
        splits="a b, a b -> a . b",
    )
    add(
        "torch.hstack",
        lambda x, y: torch.hstack([x, y]),
        SQUARE,
        SQUARE,
        splits="a b, a b -> a (2 b)",
    )
    add(
        "torch.vstack",
        lambda x, y: torch.vstack([x, y]),
        SQUARE,
        SQUARE,
        splits="a b, a b -> (2 a) b",
    )
    add(
        "torch.dstack",
        lambda x, y: torch.dstack([x, y]),
        SQUARE,
        SQUARE,
        splits="a b, a b -> a b .",
    )
    add(
        "torch.column_stack",
        lambda x, y: torch.column_stack([x, y]),
        (8,),
        SQUARE,
        splits="a, a . -> a .",
    )
    add("torch.split", lambda x: torch.split(x, 6, 1), SQUARE, splits="a (2 b) -> a b, a b")
    add("torch.chunk", lambda x: torch.chunk(x, 2, 1), SQUARE, splits="a (2 b) -> a b, a b")
    add(
        "torch.tensor_split",
        lambda x: torch.tensor_split(x, 2, 1),
        SQUARE,
        splits="a (2 b) -> a b, a b",
    )
    add("torch.hsplit", lambda x: torch.hsplit(x, 2), SQUARE, splits="a (2 b) -> a b, a b")
    add("torch.unbind", lambda x: torch.unbind(x, 1), (8, 3, 12), splits="a . b -> a b, a b, a b")
    add("torch.select", lambda x: x.select(1, 2), CUBE, splits="a . c -> a c")
    add("torch.narrow", lambda x: x.narrow(1, 1, 4), CUBE, splits="a . c -> a . c")
    add("Tensor[:, ::2]", lambda x: x[:, ::2], (8, 12, 6), splits="a (b 2) c -> a b c")
    add("Tensor[..., None, :]", lambda x: x[..., None, :], SQUARE, splits="a b -> a . b")
    add("torch.flip", lambda x: x.flip(1), CUBE, splits="a . c -> a . c")
    add("torch.fliplr", torch.fliplr, CUBE, splits="a . c -> a . c")
    add("torch.rot90", lambda x: torch.rot90(x, 1, (1, 2)), CUBE, splits="a . . -> a . .")
    add("torch.roll", lambda x: x.roll(2, 1), CUBE, splits="a . c -> a . c")
    add("torch.diagonal", lambda x: x.diagonal(0, 1, 2), (8, 6, 6), splits="a . . -> a .")
    add("torch.diag_embed", torch.diag_embed, SQUARE, splits="a . -> a . .")
    add("torch.tril", torch.tril, CUBE, splits="a . . -> a . .")
    add("torch.triu", torch.triu, CUBE, splits="a . . -> a . .")
    add("Tensor.unfold", lambda x: x.unfold(1, 4, 4), (12, 8), splits="a (b 4) -> a b .")
    add("Tensor.unfold, overlapping", lambda x: x.unfold(1, 4, 2), SQUARE, splits="a . -> a . .")
    add("torch.view_as_complex", torch.view_as_complex, (8, 12, 2), splits="a b . -> a b")
    add(
        "torch.view_as_real",
        lambda x: torch.view_as_real(torch.view_as_complex(x) * 1j),
        (8, 12, 2),
        splits="a b . -> a b .",
    )
    add(
        "torch.meshgrid",
        lambda x, y: torch.meshgrid(x, y, indexing="ij"),
        (8,),
        (12,),
        splits="a, b -> a b, a b",
    )
    add("torch.cartesian_prod", torch.cartesian_prod, (8,), (12,), splits="a, . -> (a 12) .")
    add("torch.block_diag", torch.block_diag, SQUARE, SQUARE, splits=". ., . . -> . .")
    add("torch.atleast_2d", torch.atleast_2d, (8,), splits="a -> . a")
    add("F.pad", lambda x: F.pad(x, (1, 1)), CUBE, splits="a b . -> a b .")
    add("F.pad, reflect", lambda x: F.pad(x, (1, 1), mode="reflect"), CUBE, splits="a b . -> a b .")
    add(
        "F.pad, replicate",
        lambda x: F.pad(x, (1, 1), mode="replicate"),
        CUBE,
        splits="a b . -> a b .",
    )
    add(
        "F.pixel_shuffle",
        lambda x: F.pixel_shuffle(x, 2),
        (8, 16, 6, 12),
        splits="a (b 4) c d -> a b (c 2) (d 2)",
    )
    add(
        "F.pixel_unshuffle",
        lambda x: F.pixel_unshuffle(x, 2),
        (8, 6, 4, 12),
        splits="a b (c 2) (d 2) -> a (b 4) c d",
    )
    add(
        "F.channel_shuffle",
        lambda x: F.channel_shuffle(x, 2),
        (8, 8, 6, 12),
        splits="a (2 b) c d -> a (b 2) c d",
    )
    add(
        "F.one_hot",
        lambda i, x: F.one_hot(i, 6) * x,
        (8, 12),
        (1,),
        splits="a b, . -> a b .",
        ints=(0,),
    )


def indexing() -> None:
    add("F.embedding", F.embedding, (8, 12), (6, 10), splits="a b, c d -> a b d", ints=(0,))
    add(
        "F.embedding_bag, mean",
        F.embedding_bag,
        (8, 12),
        (6, 10),
        splits="a b, c d -> a d",
        ints=(0,),
    )
    add(
        "F.embedding_bag, sum",
        lambda i, w: F.embedding_bag(i, w, mode="sum"),
        (8, 12),
        (6, 10),
        splits="a b, c d -> a d",
        ints=(0,),
    )
    add(
        "F.embedding_bag, max",
        lambda i, w: F.embedding_bag(i, w, mode="max"),
        (8, 12),
        (6, 10),
        splits="a ., . d -> a d",
        ints=(0,),
    )
    add(
        "torch.gather",
        lambda x, i: x.gather(1, i),
        SQUARE,
        SQUARE,
        splits="a b, a c -> a c",
        ints=(1,),
    )
    add(
        "torch.take_along_dim",
        lambda x, i: torch.take_along_dim(x, i, 1),
        SQUARE,
        SQUARE,
        splits="a ., a c -> a c",
        ints=(1,),
    )
    add(
        "torch.index_select",
        lambda x, i: x.index_select(1, i),
        SQUARE,
        (10,),
        splits="a b, c -> a c",
        ints=(1,),
    )
    add("Tensor[index]", lambda x, i: x[i], SQUARE, (10,), splits="a b, c -> c b", ints=(1,))
    add(
        "torch.scatter",
        lambda x, i, s: x.scatter(1, i, s),
        SQUARE,
        SQUARE,
        SQUARE,
        splits="a ., a ., a . -> a .",
        ints=(1,),
    )
    add(
        "torch.scatter_add",
        lambda x, i, s: x.scatter_add(1, i, s),
        SQUARE,
        SQUARE,
        SQUARE,
        splits="a ., a b, a b -> a .",
        ints=(1,),
    )
    add(
        "torch.scatter_reduce",
        lambda x, i, s: x.scatter_reduce(1, i, s, "amax"),
        SQUARE,
        SQUARE,
        SQUARE,
        splits="a ., a ., a . -> a .",
        ints=(1,),
    )
    add(
        "torch.index_add",
        lambda x, i, s: x.index_add(0, i, s),
        SQUARE,
        (6,),
        (6, 12),
        splits=". b, c, c b -> . b",
        ints=(1,),
    )
    add(
        "torch.index_copy",
        lambda x, i, s: x.index_copy(0, i, s),
        SQUARE,
        (6,),
        (6, 12),
        splits=". b, ., . b -> . b",
        ints=(1,),
    )
    add(
        "torch.index_fill",
        lambda x, i: x.index_fill(0, i, 2.0),
        SQUARE,
        (6,),
        splits=". b, . -> . b",
        ints=(1,),
    )
    add("torch.take", torch.take, SQUARE, (10, 6), splits=". ., a b -> a b", ints=(1,))
    add(
        "torch.bucketize",
        lambda x, e: torch.bucketize(x, e.sort().values) * x,
        SQUARE,
        (6,),
        splits="a b, . -> a b",
    )
    add(
        "torch.masked_scatter",
        lambda x, m, s: x.masked_scatter(m, s),
        SQUARE,
        SQUARE,
        SQUARE,
        splits=". ., . ., . . -> . .",
        bools=(1,),
    )


def products() -> None:
    add("F.linear", F.linear, CUBE, (10, 12), (10,), splits="a b c, d c, d -> a b d")
    add("F.bilinear", F.bilinear, (8, 6), (8, 12), (10, 6, 12), splits="a b, a c, d b c -> a d")
    add("torch.mm", torch.mm, SQUARE, (12, 10), splits="a b, b c -> a c")
    add("torch.bmm", torch.bmm, CUBE, (8, 12, 10), splits="a b c, a c d -> a b d")
    add(
        "torch.matmul",
        torch.matmul,
        (8, 2, 6, 12),
        (8, 2, 12, 10),
        splits="a b c d, a b d e -> a b c e",
    )
    add("torch.mv", torch.mv, SQUARE, (12,), splits="a b, b -> a")
    add("torch.dot", torch.dot, (12,), (12,), splits="a, a -> ")
    add("torch.inner", torch.inner, SQUARE, (10, 12), splits="a b, c b -> a c")
    add("torch.outer", torch.outer, (8,), (12,), splits="a, b -> a b")
    add("torch.vecdot", torch.linalg.vecdot, SQUARE, SQUARE, splits="a b, a b -> a")
    add("torch.kron", torch.kron, (8, 6), (12, 10), splits="a b, c d -> (a c) (b d)")
    add("torch.cross", torch.linalg.cross, (8, 3), (8, 3), splits="a ., a . -> a .")
    add(
        "torch.tensordot",
        lambda x, y: torch.tensordot(x, y, 2),
        CUBE,
        (6, 12, 10),
        splits="a b c, b c d -> a d",
    )
    add(
        "torch.einsum",
        lambda x, y: torch.einsum("bqd,bkd->bqk", x, y),
        CUBE,
        (8, 10, 12),
        splits="a b c, a d c -> a b d",
    )
    add("torch.addmm", torch.addmm, (8, 10), SQUARE, (12, 10), splits="a c, a b, b c -> a c")
    add(
        "torch.baddbmm",
        torch.baddbmm,
        (8, 6, 10),
        CUBE,
        (8, 12, 10),
        splits="a b d, a b c, a c d -> a b d",
    )
    add("torch.addmv", torch.addmv, (8,), SQUARE, (12,), splits="a, a b, b -> a")
    add("torch.addr", torch.addr, SQUARE, (8,), (12,), splits="a b, a, b -> a b")
    add(
        "torch.chain_matmul",
        lambda x, y, z: torch.linalg.multi_dot([x, y, z]),
        (8, 12),
        (12, 6),
        (6, 10),
        splits="a ., . ., . b -> a b",
    )
    add("torch.cdist", torch.cdist, (8, 6, 4), (8, 10, 4), splits="a b ., a c . -> a b c")
    add("F.pdist", F.pdist, SQUARE, splits=". . -> .")
    add(
        "F.cosine_similarity",
        lambda x, y: F.cosine_similarity(x, y, -1),
        CUBE,
        CUBE,
        splits="a b ., a b . -> a b",
    )
    add("F.pairwise_distance", F.pairwise_distance, SQUARE, SQUARE, splits="a ., a . -> a")
    add(
        "F.scaled_dot_product_attention",
        F.scaled_dot_product_attention,
        (8, 4, 6, 16),
        (8, 4, 10, 16),
        (8, 4, 10, 16),
        splits="a b c ., a b . ., a b . . -> a b c .",
    )
    add(
        "torch.matrix_power",
        lambda x: torch.linalg.matrix_power(x, 3),
        (8, 6, 6),
        splits="a . . -> a . .",
    )
    add("torch.linalg.inv", torch.linalg.inv, (8, 6, 6), splits="a . . -> a . .", draw="definite")
    add(
        "torch.linalg.solve",
        torch.linalg.solve,
        (8, 6, 6),
        (8, 6, 10),
        splits="a . ., a . b -> a . b",
        draw="definite",
    )
    add("torch.linalg.det", torch.linalg.det, (8, 6, 6), splits="a . . -> a", draw="definite")
    add("torch.logdet", torch.logdet, (8, 6, 6), splits="a . . -> a", draw="definite")
    add(
        "torch.linalg.slogdet",
        lambda x: torch.linalg.slogdet(x)[1],
        (8, 6, 6),
        splits="a . . -> a",
        draw="definite",
    )
    add(
        "torch.linalg.cholesky",
        torch.linalg.cholesky,
        (8, 6, 6),
        splits="a . . -> a . .",
        draw="definite",
    )
    add("torch.linalg.svdvals", torch.linalg.svdvals, (8, 6, 10), splits="a . . -> a .")
    add("torch.linalg.qr", torch.linalg.qr, (8, 10, 6), splits="a . . -> a . ., a . .")
    add(
        "torch.linalg.eigvalsh",
        torch.linalg.eigvalsh,
        (8, 6, 6),
        splits="a . . -> a .",
        draw="definite",
    )
    add("torch.linalg.pinv", torch.linalg.pinv, (8, 6, 10), splits="a . . -> a . .")
    add("torch.linalg.matrix_norm", torch.linalg.matrix_norm, (8, 6, 10), splits="a . . -> a")
    add("torch.matrix_exp", torch.matrix_exp, (8, 6, 6), splits="a . . -> a . .")
    add(
        "torch.linalg.solve_triangular",
        lambda x, y: torch.linalg.solve_triangular(x, y, upper=True),
        (8, 6, 6),
        (8, 6, 10),
        splits="a . ., a . b -> a . b",
        draw="definite",
    )
    add("torch.fft.fft", lambda x: torch.fft.fft(x).abs(), CUBE, splits="a b . -> a b .")
    add("torch.fft.rfft", lambda x: torch.fft.rfft(x).abs(), CUBE, splits="a b . -> a b .")
    add(
        "torch.fft.irfft",
        lambda x: torch.fft.irfft(torch.fft.rfft(x)),
        CUBE,
        splits="a b . -> a b .",
    )
    add("torch.fft.fft2", lambda x: torch.fft.fft2(x).real, IMAGE, splits="a b . . -> a b . .")
    add("torch.fft.fftshift", lambda x: torch.fft.fftshift(x, 1), CUBE, splits="a . c -> a . c")
    add(
        "torch.stft",
        lambda x: torch.stft(x, 16, return_complex=True).abs(),
        (8, 64),
        splits="a . -> a . .",
    )


def images() -> None:
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area"):
        splits = (
            "a b c d -> a b (c 2) (d 2)" if mode.startswith("nearest") else "a b . . -> a b . ."
        )
        add(
            f"F.interpolate, {mode}",
            lambda x, m=mode: F.interpolate(x, scale_factor=2, mode=m),
            IMAGE,
            splits=splits,
        )
    add(
        "F.interpolate, linear",
        lambda x: F.interpolate(x, size=20, mode="linear"),
        CUBE,
        splits="a b . -> a b .",
    )
    add(
        "F.interpolate, trilinear",
        lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
        (4, 2, 6, 6, 6),
        splits="a b . . . -> a b . . .",
    )
    add(
        "F.grid_sample",
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        IMAGE,
        (8, 10, 4, 2),
        splits="a b . ., a c d . -> a b c d",
    )
    add(
        "F.affine_grid",
        lambda t: F.affine_grid(t, [8, 6, 12, 16], align_corners=False),
        (8, 2, 3),
        splits="a . . -> a . . .",
    )
    add("F.unfold", lambda x: F.unfold(x, 3), IMAGE, splits="a b . . -> a (b 9) .")
    add("F.fold", lambda x: F.fold(x, (12, 16), 3), (8, 54, 140), splits="a (b 9) . -> a b . .")
    add(
        "F.conv1d",
        lambda x, w, b: F.conv1d(x, w, b, padding=1),
        CUBE,
        (10, 6, 3),
        (10,),
        splits="a b c, d b ., d -> a d c",
    )
    add(
        "F.conv2d",
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        IMAGE,
        (10, 6, 3, 3),
        (10,),
        splits="a b c d, e b . ., e -> a e c d",
    )
    add(
        "F.conv3d",
        F.conv3d,
        (4, 6, 6, 6, 6),
        (10, 6, 3, 3, 3),
        splits="a b . . ., e b . . . -> a e . . .",
    )
    add(
        "F.conv_transpose2d",
        F.conv_transpose2d,
        IMAGE,
        (6, 10, 3, 3),
        splits="a b . ., b e . . -> a e . .",
    )
    add(
        "F.conv2d, depthwise",
        lambda x, w: F.conv2d(x, w, groups=6),
        IMAGE,
        (6, 1, 3, 3),
        splits="a b . ., b . . . -> a b . .",
    )
    add("F.max_pool1d", lambda x: F.max_pool1d(x, 2), CUBE, splits="a b (c 2) -> a b c")
    add("F.max_pool2d", lambda x: F.max_pool2d(x, 2), IMAGE, splits="a b (c 2) (d 2) -> a b c d")
    add("F.avg_pool1d", lambda x: F.avg_pool1d(x, 2), CUBE, splits="a b (c 2) -> a b c")
    add("F.avg_pool2d", lambda x: F.avg_pool2d(x, 2), IMAGE, splits="a b (c 2) (d 2) -> a b c d")
    add(
        "F.avg_pool3d",
        lambda x: F.avg_pool3d(x, 3),
        (4, 2, 6, 6, 6),
        splits="a b (c 3) (d 3) (e 3) -> a b c d e",
    )
    add(
        "F.lp_pool2d",
        lambda x: F.lp_pool2d(x, 2, 2),
        IMAGE,
        splits="a b (c 2) (d 2) -> a b c d",
        draw="positive",
    )
    add(
        "F.adaptive_avg_pool1d",
        lambda x: F.adaptive_avg_pool1d(x, 4),
        CUBE,
        splits="a b . -> a b .",
    )
    add(
        "F.adaptive_avg_pool2d",
        lambda x: F.adaptive_avg_pool2d(x, 1),
        IMAGE,
        splits="a b c d -> a b . .",
    )
    add(
        "F.adaptive_max_pool2d",
        lambda x: F.adaptive_max_pool2d(x, 2),
        IMAGE,
        splits="a b . . -> a b . .",
    )


def losses() -> None:
    same = (
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "soft_margin_loss",
        "poisson_nll_loss",
        "hinge_embedding_loss",
    )
    for name in same:
        add(
            f"F.{name}",
            getattr(F, name),
            SQUARE,
            SQUARE,
            splits="a b, a b -> ",
            draw="signs",
            fixed=(1,),
        )
    for name in ("binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"):
        function = getattr(F, name)
        called = (
            (lambda x, y: F.kl_div(x.log(), y, reduction="sum")) if name == "kl_div" else function
        )
        add(f"F.{name}", called, SQUARE, SQUARE, splits="a b, a b -> ", draw="positive")
    add(
        "F.kl_div, batchmean",
        lambda x, y: F.kl_div(x.log(), y, reduction="batchmean"),
        SQUARE,
        SQUARE,
        splits="a b, a b -> ",
        draw="positive",
    )
    add(
        "F.mse_loss, sum",
        lambda x, y: F.mse_loss(x, y, reduction="sum"),
        SQUARE,
        SQUARE,
        splits="a b, a b -> ",
    )
    add(
        "F.mse_loss, none",
        lambda x, y: F.mse_loss(x, y, reduction="none"),
        SQUARE,
        SQUARE,
        splits="a b, a b -> a b",
    )
    add("F.cross_entropy", F.cross_entropy, SQUARE, (8,), splits="a b, a -> ", ints=(1,))
    add("F.nll_loss", F.nll_loss, SQUARE, (8,), splits="a b, a -> ", ints=(1,))
    add("F.multi_margin_loss", F.multi_margin_loss, SQUARE, (8,), splits="a ., a -> ", ints=(1,))
    add(
        "F.multilabel_margin_loss",
        F.multilabel_margin_loss,
        SQUARE,
        SQUARE,
        splits="a ., a . -> ",
        ints=(1,),
    )
    add(
        "F.multilabel_soft_margin_loss",
        F.multilabel_soft_margin_loss,
        SQUARE,
        SQUARE,
        splits="a b, a b -> ",
        draw="positive",
    )
    add(
        "F.margin_ranking_loss",
        F.margin_ranking_loss,
        (8,),
        (8,),
        (8,),
        splits="a, a, a -> ",
        draw="signs",
    )
    add(
        "F.cosine_embedding_loss",
        F.cosine_embedding_loss,
        SQUARE,
        SQUARE,
        (8,),
        splits="a ., a ., a -> ",
        draw="signs",
    )
    add(
        "F.triplet_margin_loss",
        F.triplet_margin_loss,
        SQUARE,
        SQUARE,
        SQUARE,
        splits="a ., a ., a . -> ",
    )
    add(
        "F.triplet_margin_with_distance_loss",
        F.triplet_margin_with_distance_loss,
        SQUARE,
        SQUARE,
        SQUARE,
        splits="a ., a ., a . -> ",
    )


for family in (pointwise, reductions, views, indexing, products, images, losses):
    family()
