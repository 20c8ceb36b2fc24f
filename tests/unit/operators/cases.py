"""At least one call of every operator in the table, small enough to run in parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardfold.runtime.ops.experts  # noqa: F401  registers shardfold.expert_linear
from shardfold.capture.experts import described

from . import parts
from .oracle import Case

STATISTICS = ("running_mean", "running_var")
GENERATOR = torch.Generator().manual_seed(2)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


def positive(*shape: int) -> Tensor:
    return torch.rand(shape, generator=GENERATOR, dtype=torch.float64) * 0.8 + 0.1


def ints(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=GENERATOR)


def bools(*shape: int) -> Tensor:
    return normal(*shape) > 0


def case(name: str, arguments: dict[str, Any], **properties: Any) -> Case:
    """A call of `aten.name`, or of another library's operator, with an overload after a dot."""
    library, _, rest = name.rpartition("::")
    packet, _, overload = rest.partition(".")
    operator = getattr(getattr(torch.ops, library or "aten"), packet)
    return Case(getattr(operator, overload or "default"), arguments, **properties)


GATES = {
    "halves": lambda rows: F.silu(rows.chunk(2, -1)[0]) * rows.chunk(2, -1)[1],
    "pairs": lambda rows: rows[..., ::2].clamp(max=1.0) * (rows[..., 1::2] + 1),
    "own": F.gelu,
}


def between(function: Any, wide: int = 16) -> str:
    """What stands between the products of a block of experts."""
    return str(described(function, wide, torch.float64))


def _rows_of_block(part: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Experts count from the part's first; a row of another one has none.

    A bias is added by one part of the features that are summed over.
    """
    if part.factor == "f" and part.number and "down_bias" in arguments:
        return {**arguments, "down_bias": arguments["down_bias"] * 0}
    if part.factor != "e":
        return arguments
    expert = arguments["expert"]
    inside = (expert >= part.low) & (expert < part.high)
    return {**arguments, "expert": torch.where(inside, expert - part.low, -1)}


def matrix() -> list[Case]:
    expert = {"x": normal(4, 6), "weight": normal(4, 8, 6), "expert": ints(4, 4)}
    pairs = {**expert, "x": normal(4, 2, 6), "expert": ints(4, 4, 2)}
    rows_of_expert = parts.rows_of("weight", "expert", "e", 0)
    block = {"x": normal(4, 6), "expert": ints(4, 4, 2), "share": positive(4, 2)}
    block |= {"up": normal(4, 16, 6), "down": normal(4, 6, 8), "between": between(GATES["halves"])}
    biased = {**block, "up_bias": normal(4, 16), "down_bias": normal(4, 6)}
    biased |= {"between": between(GATES["pairs"])}
    plain = {**block, "expert": ints(4, 4, 1), "share": positive(4, 1), "up": normal(4, 8, 6)}
    plain |= {"between": between(GATES["own"], 8)}
    linear = {"input": normal(4, 3, 6), "weight": normal(8, 6)}
    grouped = {
        "self": normal(8, 16).to(torch.bfloat16),
        "mat2": normal(2, 16, 32).to(torch.bfloat16),
        "offs": torch.tensor([3, 8], dtype=torch.int32),
    }
    return [
        case("linear", linear),
        case("linear", {**linear, "bias": normal(8)}, once=("bias",), label="bias"),
        case("linear", {"input": normal(6), "weight": normal(8, 6)}, label="vector"),
        case("mm", {"self": normal(4, 6), "mat2": normal(6, 8)}),
        case("mv", {"self": normal(4, 6), "vec": normal(6)}),
        case("dot", {"self": normal(6), "tensor": normal(6)}),
        case("outer", {"self": normal(4), "vec2": normal(6)}),
        case("bmm", {"self": normal(2, 4, 6), "mat2": normal(2, 6, 8)}),
        case(
            "addmm", {"self": normal(8), "mat1": normal(4, 6), "mat2": normal(6, 8)}, once=("self",)
        ),
        case(
            "addmm",
            {"self": normal(4, 1), "mat1": normal(4, 6), "mat2": normal(6, 8), "beta": 2.0},
            once=("self",),
            label="column",
        ),
        case(
            "baddbmm",
            {"self": normal(2, 1, 8), "batch1": normal(2, 4, 6), "batch2": normal(2, 6, 8)},
            once=("self",),
        ),
        case("matmul", {"self": normal(2, 1, 4, 6), "other": normal(3, 6, 8)}),
        case("matmul", {"self": normal(6), "other": normal(6, 8)}, label="row"),
        case("matmul", {"self": normal(3, 4, 6), "other": normal(6)}, label="column"),
        case("matmul", {"self": normal(6), "other": normal(6)}, label="vectors"),
        case("matmul", {"self": normal(1, 4, 6), "other": normal(1, 6, 4)}, label="one"),
        case("einsum", {"equation": "bqd,bkd->bqk", "tensors": [normal(2, 4, 6), normal(2, 8, 6)]}),
        case("einsum", {"equation": "i,j", "tensors": [normal(4), normal(6)]}, label="implicit"),
        case(
            "einsum",
            {"equation": "...qd,...kd->...qk", "tensors": [normal(2, 3, 4, 6), normal(3, 8, 6)]},
            label="dots",
        ),
        case("_grouped_mm", grouped, counts=(2,), fixed=("self", "mat2")),
        case("shardfold::expert_linear", expert, localise=rows_of_expert),
        case("shardfold::expert_linear", pairs, localise=rows_of_expert, label="top two"),
        case("shardfold::routed_experts", block, localise=_rows_of_block),
        case("shardfold::routed_experts", biased, localise=_rows_of_block, label="biased"),
        case("shardfold::routed_experts", plain, localise=_rows_of_block, label="one expert a row"),
    ]


def attention() -> list[Case]:
    plain = {"query": normal(2, 4, 6, 8), "key": normal(2, 4, 3, 8), "value": normal(2, 4, 3, 8)}
    shared = {**plain, "key": normal(2, 2, 3, 8), "value": normal(2, 2, 3, 8), "enable_gqa": True}
    single = {**plain, "key": normal(2, 1, 3, 8), "value": normal(2, 1, 3, 8), "enable_gqa": True}
    name = "scaled_dot_product_attention"
    causal = {"query": normal(2, 4, 6, 8), "key": normal(2, 4, 6, 8), "value": normal(2, 4, 6, 8)}
    return [
        case(name, plain),
        case(name, {**plain, "attn_mask": normal(2, 1, 6, 3)}, label="mask"),
        case(name, {**plain, "attn_mask": normal(6, 3)}, label="flat mask"),
        case(name, shared, label="grouped"),
        case(name, {**shared, "attn_mask": normal(2, 4, 6, 3)}, label="grouped mask"),
        case(name, single, label="one key head"),
        case(name, {k: v[0] for k, v in plain.items()}, label="no batch"),
        case(name, {**causal, "is_causal": True}, label="causal", localise=_causal_rows),
    ]


def _causal_rows(part: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """A part of the queries sees the keys up to its own rows."""
    if part.factor != "q":
        return arguments
    rows = torch.arange(part.low, part.high)[:, None]
    mask = torch.arange(arguments["key"].shape[-2])[None, :] <= rows
    return {**arguments, "is_causal": False, "attn_mask": mask}


def convolution() -> list[Case]:
    def conv(name: str, label: str = "", groups: int = 1, **more: Any) -> Case:
        local = parts.counted("groups", "g")
        arguments = {**more, "groups": groups}
        return case(name, arguments, once=("bias",), localise=local, label=label)

    plain = {"input": normal(4, 6, 5, 7), "weight": normal(8, 6, 3, 3), "bias": normal(8)}
    full = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "output_padding": [0, 0]}
    halo = {"input": normal(4, 6, 4, 8), "weight": normal(8, 6, 3, 3), "bias": normal(8)}
    return [
        conv("conv2d", "halo", **halo, padding=[1, 1]),
        conv("conv2d", "no padding", **plain),
        conv("conv2d", "one by one", input=normal(2, 4, 6, 4), weight=normal(8, 4, 1, 1)),
        conv(
            "conv2d",
            "patches",
            input=normal(2, 4, 8, 12),
            weight=normal(6, 4, 2, 4),
            bias=normal(6),
            stride=[2, 4],
        ),
        conv(
            "conv2d",
            "grouped",
            groups=3,
            input=normal(2, 6, 5, 5),
            weight=normal(12, 2, 3, 3),
            bias=normal(12),
            padding=[1, 1],
        ),
        conv("conv2d", "depthwise", groups=6, input=normal(2, 6, 5, 5), weight=normal(6, 1, 3, 3)),
        conv("conv2d", "single", input=normal(4, 5, 5), weight=normal(8, 4, 3, 3)),
        conv("conv2d.padding", "same", **plain, padding="same"),
        conv("conv1d", input=normal(4, 6, 8), weight=normal(8, 6, 2), stride=[2]),
        conv("conv3d", input=normal(2, 4, 4, 4, 4), weight=normal(6, 4, 2, 2, 2), stride=[2, 2, 2]),
        conv("convolution", **plain, **full, transposed=False),
        conv(
            "convolution",
            "transposed",
            input=normal(4, 6, 5, 7),
            weight=normal(6, 8, 3, 3),
            bias=None,
            **full,
            transposed=True,
        ),
        conv("conv_transpose1d", input=normal(4, 6, 5), weight=normal(6, 8, 3), bias=normal(8)),
        conv(
            "conv_transpose2d.input",
            groups=2,
            input=normal(4, 6, 5, 3),
            weight=normal(6, 4, 3, 3),
            bias=normal(8),
            stride=[2, 2],
        ),
        conv("conv_transpose3d.input", input=normal(2, 4, 3, 3, 3), weight=normal(4, 6, 2, 2, 2)),
    ]


def pooling() -> list[Case]:
    shapes = {1: (2, 4, 12), 2: (2, 4, 12, 6), 3: (2, 4, 4, 6, 4)}
    cases = []
    for rank, shape in shapes.items():
        halves = {"kernel_size": [2] * rank, "stride": [2] * rank}
        odd = {"kernel_size": [3] * rank, "stride": [2] * rank}
        for name in (f"max_pool{rank}d", f"avg_pool{rank}d", f"max_pool{rank}d_with_indices"):
            cases.append(case(name, {"self": normal(*shape), **halves}))
            cases.append(case(name, {"self": normal(*shape), **odd}, label="overlap"))
        for to, label in (([1] * rank, "to one"), ([2] * rank, "to two"), ([3] * rank, "to three")):
            local = parts.sized("output_size", rank)
            properties: dict[str, Any] = {"localise": local, "label": label}
            given = {"self": normal(*shape), "output_size": to}
            cases.append(case(f"adaptive_avg_pool{rank}d", given, is_mean=True, **properties))
            cases.append(case(f"adaptive_max_pool{rank}d", given, **properties))
    return cases


def normalisation() -> list[Case]:
    rows = {"input": normal(4, 3, 6), "normalized_shape": [6]}
    affine = {"weight": normal(6), "bias": normal(6), "eps": 1e-5}
    image = {"input": normal(4, 6, 4, 2)}
    channel = {"weight": normal(6), "bias": normal(6)}
    running = {"running_mean": normal(6), "running_var": positive(6)}
    flags = {"momentum": 0.1, "eps": 1e-5}
    grouped = {**image, **channel, "eps": 1e-5}
    cases = [
        case("layer_norm", {**rows, **affine}),
        case(
            "layer_norm", {"input": normal(4, 3, 6), "normalized_shape": [3, 6]}, label="two dims"
        ),
        case("native_layer_norm", {**rows, **affine}),
        case("rms_norm", {**rows, "weight": normal(6)}),
        case("_fused_rms_norm", {**rows, "weight": normal(6), "eps": 1e-5}),
        case("group_norm", {**grouped, "num_groups": 3}, localise=parts.counted("num_groups", "g")),
        case("group_norm", {**grouped, "num_groups": 1}, label="one group"),
        case(
            "group_norm",
            {**grouped, "num_groups": 6},
            localise=parts.counted("num_groups", "g"),
            label="all groups",
        ),
        case(
            "native_group_norm",
            {**grouped, "N": 4, "C": 6, "HxW": 8, "group": 3},
            localise=parts.group_norm_sizes,
        ),
    ]
    for own in (True, False):
        label = "" if own else "fixed"
        stats: dict[str, Any] = {"running_mean": None, "running_var": None} if own else running
        given = {**image, **channel, **stats, **flags, "cudnn_enabled": False}
        cases.append(
            case("instance_norm", {**given, "use_input_stats": own}, label=label, fixed=STATISTICS)
        )
        stats = {**image, **channel, **running, **flags, "training": own}
        plain = {**stats, "cudnn_enabled": False}
        cases.append(case("batch_norm", plain, label=label, fixed=STATISTICS))
        for name in ("", "_legit", "_legit_functional"):
            name = f"_native_batch_norm{name}" if name else "native_batch_norm"
            cases.append(case(name, stats, label=label, fixed=STATISTICS))
    for name in ("_batch_norm_with_update", "_batch_norm_with_update_functional"):
        cases.append(case(name, {**image, **channel, **running, **flags}, fixed=STATISTICS))
    cases.append(case("_weight_norm", {"v": normal(4, 6, 3), "g": normal(1, 6, 1), "dim": 1}))
    for name in ("softmax.int", "log_softmax.int", "_safe_softmax"):
        cases.append(case(name, {"self": normal(4, 6, 2), "dim": 1}))
    for name in ("_softmax", "_log_softmax"):
        cases.append(case(name, {"self": normal(4, 6, 2), "dim": -1, "half_to_float": False}))
    return cases


def losses() -> list[Case]:
    cases = []
    pointwise = (
        "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss kl_div binary_cross_entropy "
        "binary_cross_entropy_with_logits"
    )
    for reduction in (1, 2, 0):
        label = ("none", "mean", "sum")[reduction]
        for name in pointwise.split():
            given = {"self": positive(4, 6), "target": positive(4, 6), "reduction": reduction}
            fixed = ("target",) if name == "soft_margin_loss" else ()
            cases.append(case(name, given, is_mean=reduction == 1, label=label, fixed=fixed))
        picked = {"self": normal(4, 6), "target": ints(6, 4), "reduction": reduction}
        plane = {"self": normal(4, 6, 2, 2), "target": ints(6, 4, 2, 2), "reduction": reduction}
        classes = parts.rows_of("self", "target", "c", 1)
        for name in ("nll_loss", "nll_loss_nd"):
            cases.append(case(name, picked, localise=classes, label=label))
        cases.append(case("nll_loss2d", plane, localise=classes, label=label))
        for name, given in (("nll_loss_forward", picked), ("nll_loss2d_forward", plane)):
            full = {**given, "weight": None, "ignore_index": -100}
            cases.append(case(name, full, label=label))
        cases.append(case("cross_entropy_loss", picked, label=label))
        cases.append(case("cross_entropy_loss", plane, label=f"{label} plane"))
        soft = {**picked, "target": positive(4, 6)}
        cases.append(
            case("cross_entropy_loss", soft, is_mean=reduction == 1, label=f"{label} soft")
        )
    weighted = {"self": positive(4, 6), "target": positive(4, 6), "pos_weight": positive(6)}
    name = "binary_cross_entropy_with_logits"
    cases.append(case(name, weighted, is_mean=True, label="weight", fixed=("pos_weight",)))
    return cases


def found() -> list[Case]:
    """Operators that have no rule: an experiment finds one."""
    image, points = normal(4, 8, 6, 4), {"x1": normal(4, 6, 3), "x2": normal(4, 8, 3)}
    unsized = {"output_size": None}
    three = {"anchor": normal(4, 6), "positive": normal(4, 6), "negative": normal(4, 6)}
    bilinear = {"input1": normal(4, 6), "input2": normal(4, 8), "weight": normal(10, 6, 8)}
    dots = {"self": normal(4, 6, 8), "other": normal(6, 8, 10)}
    return [
        case("erfc", {"self": normal(4, 6)}),
        case("view_as_real", {"self": torch.view_as_complex(normal(4, 6, 2))}),
        case("repeat_interleave.self_int", {"self": normal(4, 6, 8), "repeats": 3, "dim": 1}),
        case("tile", {"self": normal(4, 6), "dims": [2, 3]}),
        case("kron", {"self": normal(4, 6), "other": normal(8, 10)}),
        case("glu", {"self": normal(4, 12), "dim": 1}),
        case("pixel_shuffle", {"self": image, "upscale_factor": 2}),
        case("upsample_nearest2d.vec", {"input": image, "scale_factors": [2.0, 2.0], **unsized}),
        case("view_as_complex", {"self": normal(4, 6, 2)}),
        case("cdist", points),
        case("bilinear", {**bilinear, "bias": None}),
        case("tensordot", {**dots, "dims_self": [1, 2], "dims_other": [0, 1]}),
        case("triplet_margin_loss", three),
        case("diagonal", {"self": normal(4, 6, 6), "dim1": 1, "dim2": 2}),
        case("linalg_inv", {"A": normal(4, 6, 6)}),
    ]


def reduction() -> list[Case]:
    x, signs = normal(4, 6, 3), {"self": bools(4, 6, 3)}
    cases = [
        case("sum.dim_IntList", {"self": x, "dim": [1]}),
        case("sum", {"self": x}, label="of all"),
        case("sum.dim_IntList", {"self": x, "dim": [0, -1], "keepdim": True}, label="keep"),
        case("mean.dim", {"self": x, "dim": [1]}, is_mean=True),
        case("mean.dim", {"self": x, "dim": [-1], "keepdim": True}, is_mean=True, label="keep"),
        case("mean", {"self": x}, is_mean=True, label="of all"),
        case("nansum", {"self": x, "dim": [1]}),
        case("count_nonzero.dim_IntList", {"self": ints(2, 4, 6), "dim": [1]}),
        case("amax", {"self": x, "dim": [1]}),
        case("amin", {"self": x, "dim": [1], "keepdim": True}),
        case("aminmax", {"self": x, "dim": 1}),
        case("any.dim", {**signs, "dim": 1}),
        case("all.dim", {**signs, "dim": 1}),
        case("any", signs, label="of all"),
        case("logsumexp", {"self": x, "dim": [1]}),
        case("norm.ScalarOpt_dim", {"self": x, "p": 2, "dim": [1]}),
        case("linalg_vector_norm", {"self": x, "dim": [1]}),
        case("linalg_norm", {"self": x, "dim": [1]}),
        case("frobenius_norm.dim", {"self": x, "dim": [1], "keepdim": False}),
    ]
    for name in ("max", "min"):
        cases.append(case(f"{name}.dim", {"self": x, "dim": 1}))
        cases.append(case(name, {"self": x}, label="of all"))
        cases.append(case(f"{name}.other", {"self": x, "other": normal(6, 1)}, label="of two"))
    cases.append(case("prod.dim_int", {"self": x, "dim": 1}))
    for name in ("median.dim", "nanmedian.dim", "mode", "argmax", "argmin", "cumsum", "cumprod"):
        cases.append(case(name, {"self": x, "dim": 1}))
    for name in ("cummax", "cummin", "logcumsumexp"):
        cases.append(case(name, {"self": x, "dim": -1}))
    for name in ("var", "std", "var_mean", "std_mean"):
        cases.append(case(f"{name}.correction", {"self": x, "dim": [1], "correction": 1}))
        cases.append(case(name, {"self": x}, label="of all"))
    return cases


def indexing() -> list[Case]:
    table, rows = normal(8, 6), ints(8, 4)
    embedding = {"weight": table, "indices": ints(8, 4, 3)}
    bags = {
        "weight": table,
        "indices": ints(8, 4, 6),
        "per_sample_weights": None,
        "padding_idx": -1,
    }
    lookup = parts.rows_of("self", "indices[0]", "v0", 0)
    inner = parts.rows_of("self", "indices[1]", "v1", 1)
    along = {"self": normal(4, 6), "dim": 1, "index": ints(6, 4, 3)}
    wide = {**along, "index": ints(6, 2, 3)}
    unique = torch.stack([torch.randperm(6, generator=GENERATOR)[:3] for _ in range(4)])
    write = {"self": normal(4, 6), "dim": 1, "index": unique}
    column = parts.rows_of("self", "index", "v", 1)
    into = parts.rows_of("self", "index", "v", 1, writes=True)
    put = {"self": table, "indices": [torch.tensor([5, 1, 7, 2])], "values": normal(4, 6)}
    puts = parts.rows_of("self", "indices[0]", "v0", 0, writes=True)
    add = {"self": table, "dim": 0, "index": rows, "source": normal(4, 6)}
    adds = parts.rows_of("self", "index", "v", 0, writes=True)
    copy = {**add, "index": torch.tensor([5, 1, 7, 2])}
    return [
        case("embedding", embedding, localise=parts.rows_of("weight", "indices", "v", 0)),
        *(
            case(
                "shardfold::embedding_bag",
                {**bags, "mode": mode},
                localise=parts.bag_rows,
                label=label,
            )
            for mode, label in enumerate(("sum", "mean", "max"))
        ),
        case("index.Tensor", {"self": table, "indices": [rows]}, localise=lookup),
        case(
            "index.Tensor",
            {"self": normal(4, 6, 2), "indices": [None, ints(6, 3, 2)]},
            localise=inner,
            label="second dim",
        ),
        case(
            "index.Tensor",
            {"self": normal(4, 6, 2), "indices": [ints(4, 3, 1), ints(6, 2)]},
            label="two",
        ),
        case(
            "index.Tensor",
            {"self": normal(4, 6, 2), "indices": [ints(4, 3), None, ints(2, 3)]},
            label="apart",
        ),
        case(
            "index_select",
            {"self": table, "dim": 0, "index": rows},
            localise=parts.rows_of("self", "index", "v", 0),
        ),
        case("gather", along, localise=column),
        case("gather", wide, localise=column, label="fewer rows"),
        case(
            "take_along_dim",
            {"self": normal(4, 6), "dim": 1, "indices": ints(6, 4, 3)},
            localise=parts.rows_of("self", "indices", "v", 1),
        ),
        case(
            "take_along_dim",
            {"self": normal(4, 6), "dim": 1, "indices": ints(6, 1, 3)},
            localise=parts.rows_of("self", "indices", "v", 1),
            label="broadcast",
        ),
        case("scatter.src", {**write, "src": normal(4, 3)}, localise=into),
        case("scatter.value", {**write, "value": 2.0}, localise=into, label="value"),
        case("scatter_add", {**along, "src": normal(4, 3)}, once=("self",), localise=into),
        case(
            "scatter_add",
            {**wide, "src": normal(2, 3)},
            once=("self",),
            localise=into,
            label="fewer",
        ),
        case(
            "scatter_reduce.two",
            {**along, "src": normal(4, 3), "reduce": "sum"},
            once=("self",),
            localise=into,
        ),
        case(
            "scatter_reduce.two",
            {**along, "src": normal(4, 3), "reduce": "amax"},
            label="amax",
            localise=into,
        ),
        case("index_add", add, once=("self",), localise=adds),
        case("index_copy", copy, localise=adds),
        case("index_put", put, localise=puts),
        case("index_put", {**put, "accumulate": True}, once=("self",), localise=puts, label="add"),
        case(
            "index_put",
            {**put, "values": normal(6), "accumulate": True},
            once=("self",),
            localise=puts,
            label="one row for all",
        ),
        case("topk", {"self": normal(4, 6), "k": 2}),
        case("sort", {"self": normal(4, 6), "dim": 0}),
        case("argsort", {"self": normal(4, 6)}),
        case("one_hot", {"self": ints(6, 4, 3), "num_classes": 6}),
        case("bucketize.Tensor", {"self": normal(4, 6), "boundaries": torch.tensor([-1.0, 0, 1])}),
        case(
            "searchsorted.Tensor",
            {"sorted_sequence": torch.tensor([-1.0, 0, 1]).double(), "self": normal(4)},
        ),
        case("histc", {"self": normal(8), "bins": 4, "min": -2, "max": 2}),
        case("histc", {"self": normal(8), "bins": 4}, label="own range"),
        case("tril", {"self": normal(2, 6, 6)}),
        case("triu", {"self": normal(2, 4, 6), "diagonal": 1}),
    ]


def creation() -> list[Case]:
    x, size = normal(4, 6), [4, 6]
    cases = [
        case("arange", {"end": 6}),
        case("full", {"size": size, "fill_value": 2.0}),
        case("scalar_tensor", {"s": 2.0}),
        case("eye", {"n": 4}),
        case("linspace", {"start": 0.0, "end": 1.0, "steps": 6}),
        case("randperm", {"n": 6}, same_values=False),
        case("randint", {"high": 6, "size": size}, same_values=False),
        case("tril_indices", {"row": 4, "col": 4}),
        case("triu_indices", {"row": 4, "col": 4}),
        case("new_full", {"self": x, "size": [3], "fill_value": 1.0}),
        case("full_like", {"self": x, "fill_value": 2.0}),
        case("randint_like", {"self": ints(4, 4, 6), "high": 4}, same_values=False),
        case("empty.memory_format", {"size": size}, same_values=False),
    ]
    cases += [case(name, {"size": size}) for name in ("zeros", "ones")]
    cases += [case(name, {"size": size}, same_values=False) for name in ("rand", "randn")]
    cases += [case(name, {"self": x, "size": [3]}) for name in ("new_zeros", "new_ones")]
    cases.append(case("new_empty", {"self": x, "size": [3]}, same_values=False))
    cases += [case(name, {"self": x}) for name in ("zeros_like", "ones_like")]
    for name in ("empty_like", "rand_like", "randn_like"):
        cases.append(case(name, {"self": x}, same_values=False))
    return cases


def recurrent() -> list[Case]:
    def parameters(gates: int, layers: int, ways: int = 1) -> list[Tensor]:
        found = []
        for layer in range(layers):
            for _ in range(ways):
                inner = 3 if layer == 0 else 4 * ways
                found += [normal(gates * 4, inner), normal(gates * 4, 4)]
                found += [normal(gates * 4), normal(gates * 4)]
        return found

    flags = {"has_biases": True, "dropout": 0.0, "train": True}

    def network(name: str, gates: int, layers: int, both: bool, first: bool) -> Case:
        state = normal(layers * (1 + both), 2, 4)
        arguments = {
            "input": normal(2, 5, 3) if first else normal(5, 2, 3),
            "hx": [state, normal(*state.shape)] if gates == 4 else state,
            "params": parameters(gates, layers, 1 + both),
            "num_layers": layers,
            "bidirectional": both,
            "batch_first": first,
            **flags,
        }
        label = " ".join([f"{layers} layers", *["both ways"] * both, *["batch first"] * first])
        return case(f"{name}.input", arguments, label=label)

    packed = {
        "data": normal(7, 3),
        "batch_sizes": torch.tensor([3, 2, 1, 1]),
        "hx": normal(1, 3, 4),
        "params": parameters(3, 1),
        "num_layers": 1,
        "bidirectional": False,
        **flags,
    }
    projected = {
        "input": normal(5, 2, 3),
        "hx": [normal(1, 2, 2), normal(1, 2, 4)],
        "params": [normal(16, 3), normal(16, 2), normal(16), normal(16), normal(2, 4)],
        "num_layers": 1,
        "bidirectional": False,
        "batch_first": False,
        **flags,
    }
    return [
        network(name, gates, layers, both, first)
        for name, gates in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1))
        for layers, both, first in ((1, False, True), (2, False, False), (2, True, True))
    ] + [
        case("gru.data", packed, label="packed"),
        case("lstm.input", projected, label="projected"),
    ]
