"""Normalisations and softmax: a split of the normalised factor reduces its statistics.

`... d, d, d -> ... d`: rows split freely. Where d is split, every row's sums are all-reduced, two
words a row for a mean and a variance (in float64: their difference is what counts), one for a mean
square; for a softmax one for the maximum, and then one for the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from shardfold.graph import TensorType
from shardfold.operators.kernels import Access, Kernel, LocalWork, rows, way
from shardfold.operators.notation import Call, Exchange, Phase, Rule
from shardfold.operators.operator import Extra, Operator, aten

EXACT_BYTES = 8  # a float64
RUNNING = 5  # calls by which a batch norm of a part updates its running statistics


def statistics_bytes(kind: TensorType) -> int:
    """Sums are kept and sent in the dtype of what is summed, but in no less than four bytes."""
    return max(4, kind.item_bytes)


def _sums(
    call: Call, factors: Iterable[str], rows: Iterable[str], forward: float, backward: float
) -> tuple[Exchange, ...]:
    """All-reduces of so many words a row in each pass, for each factor that may be split.

    Words are those of the statistics' dtype; those of backward serve the gradient of the input.
    """
    own = (call.inputs[0], call.results[0])  # of a softmax, the result may be wider
    over, size = tuple(rows), max(map(statistics_bytes, own))
    passes: tuple[tuple[Phase, float, int | None], ...] = (
        ("forward", forward, None),
        ("backward", backward, 0),
    )
    return tuple(
        Exchange("all_reduce", factor, over, words, size, phase=phase, of=of)
        for factor in factors
        for phase, words, of in passes
        if words
    )


def _mean_and_variance(call: Call) -> float:
    """The two sums of float64 that a mean and a variance take, in words of the statistics."""
    return 2.0 * EXACT_BYTES / statistics_bytes(call.inputs[0])


def _layer_norm(call: Call, forward: float, backward: float) -> Rule:
    """Statistics over the trailing dims; further results are one number a row."""
    shape = call.shape("input")
    split = len(shape) - len(call.attribute("normalized_shape"))
    rows = [f"i{k}" for k in range(split)]
    dims = [f"d{k}" for k in range(len(shape) - split)]
    full, weight = " ".join(rows + dims), " ".join(dims)
    row = " ".join([*rows, *("." for _ in dims)])
    return call.rule(
        {"input": full, "weight": weight, "bias": weight},
        *([full] + [row] * (len(call.results) - 1)),
        flops=8.0 if call.has("bias") else 5.0,
        resolved=frozenset(dims),
        exchanges=_sums(call, dims, rows, forward, backward),
        saves=("input", "weight"),
        crossed=("weight",),
        backward=1.5,
    )


def _batch_norm(call: Call) -> Rule:
    """Statistics of each channel over batch and space, if training; constants otherwise."""
    shape = call.shape("input")
    space = [f"i{k}" for k in range(2, len(shape))]
    full = " ".join(["b", "c", *space])
    channel = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), "c")
    training = call.attribute("training", True) or not call.has("running_mean")
    others = ["c" if kind.shape == shape[1:2] else "." for kind in call.results[1:]]
    reduced = ["b", *space]
    return call.rule(
        {"input": full, **channel},
        *([full, *others]),
        flops=8.0 if training else 2.0,
        resolved=frozenset(reduced if others or training else ()),
        exchanges=_sums(call, reduced, ["c"], _mean_and_variance(call), 2.0) if training else (),
        saves=("input", "weight"),
        crossed=("weight",),
        backward=1.5,
    )


def _group_norm(call: Call) -> Rule:
    """Statistics of each group of channels over its channels and space, which stay whole."""
    shape = call.shape("input")
    groups = call.attribute("num_groups") or call.attribute("group")
    sizes = {"b": shape[0], "g": groups, "k": shape[1] // groups}
    channels = f"({' '.join(f for f in 'gk' if sizes[f] > 1)})"
    space = [f"i{k}" for k in range(2, len(shape))]
    full = " ".join(["b", channels, *space])
    return call.rule(
        {"input": full, "weight": channels, "bias": channels},
        *([full] + ["b g"] * (len(call.results) - 1)),
        sizes=sizes,
        flops=8.0,
        whole=frozenset({"k", *space}),
        saves=("input", "weight"),
        crossed=("weight",),
        backward=1.5,
    )


def _instance_norm(call: Call) -> Rule:
    """Statistics of each channel of each example over space, which stays whole."""
    shape = call.shape("input")
    space = [f"i{k}" for k in range(2, len(shape))]
    channel = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), "c")
    own = call.attribute("use_input_stats", True)
    return call.rule(
        {"input": " ".join(["b", "c", *space]), **channel},
        " ".join(["b", "c", *space]),
        flops=8.0,
        whole=frozenset(space if own else ()),
        exchanges=_sums(call, ["b"], ["c"], 2.0, 0.0) if own and call.has("running_mean") else (),
        saves=("input", "weight"),
        crossed=("weight",),
        copied=("weight",),
        backward=1.5,
    )


def _softmax(call: Call) -> Rule:
    shape = call.inputs[0].shape
    names = [f"i{k}" for k in range(len(shape))]
    if not names:
        return call.undescribed(backward=1.0)
    factor = names[call.attribute("dim") % len(names)]
    rows = [name for name in names if name != factor]
    return call.rule(
        {call.op.operands[0].name: " ".join(names)},
        " ".join(names),
        flops=5.0,
        exchanges=(
            *_sums(call, [factor], rows, 1.0, 0.0),
            *_sums(call, [factor], rows, 1.0, 1.0),
        ),
        saves_results=True,
        backward=1.0,
    )


def _weight_norm(call: Call) -> Rule:
    """Every slice along one dim has a length of its own, `v . ., v . . -> v . .`.

    Without a dim (-1) the whole has one, a single number.
    """
    rank, dim = len(call.shape("v")), call.attribute("dim", 0)
    names = " ".join("v" if k == dim else "." for k in range(rank))
    lengths = names if call.shape("g") else ""
    saves = ("v", "g")
    return call.rule({"v": names, "g": lengths}, names, saves=saves, crossed=("g",), backward=1.0)


def _two_words(call: Call) -> Rule:
    return _layer_norm(call, _mean_and_variance(call), 2.0)


def _one_word(call: Call) -> Rule:
    return _layer_norm(call, 1.0, 1.0)


def _row_statistics(words: int) -> Callable[[Call, Access], tuple[Extra, ...]]:
    """So many numbers of four bytes for each row that is normalised."""
    return lambda call, access: (Extra(0, 4.0 * words, len(call.attribute("normalized_shape"))),)


def _channel_statistics(call: Call, access: Access) -> tuple[Extra, ...]:
    training = call.has("weight") and bool(call.attribute("training", True))
    return (Extra(call.position("weight"), 8.0),) if training else ()


def _repeated_weight(call: Call, access: Access) -> tuple[Extra, ...]:
    """The weight once for every example: torch runs a batch norm over channels of examples."""
    space = len(call.shape("input")) - 2
    return (Extra(0, float(call.inputs[0].item_bytes), space),) if call.has("weight") else ()


def _batch_norm_kernels(work: LocalWork, phase: str) -> list[Kernel]:
    """Examples, channels, and the side of a plane; of a part, the running statistics apart."""
    b, c = work.factor("b"), work.factor("c")
    side = np.sqrt(work.operand_items(0) / (b * c))
    dtype = work.inputs[0].dtype
    is_split = work.operand_items(0) * work.parts("c") < math.prod(work.inputs[0].shape)
    is_last = work.access.is_channels_last or len(work.inputs[0].shape) == 2
    lies = ".last" if is_last else ""
    found = [Kernel(f"batch_norm{lies}.{way(phase)}", dtype, (b * ~is_split, c, side))]
    if is_split.any():
        found.append(Kernel(f"split_norm.{way(phase)}", dtype, (b * is_split, c, side)))
        if phase != "backward":
            found.append(Kernel("vector", "float32", (8.0 * c * is_split,), RUNNING))
    return found


def _group_norm_kernels(work: LocalWork, phase: str) -> list[Kernel]:
    """Groups of all examples, and what is in one."""
    groups = work.factor("b") * work.factor("g")
    sizes = (groups, work.operand_items(0) / groups)
    return [Kernel(f"group_norm.{way(phase)}", work.inputs[0].dtype, sizes)]


def _whole_rows(call: Call) -> frozenset[str]:
    """Rows without any finite value need the whole row."""
    rank = len(call.inputs[0].shape)
    return frozenset({f"i{call.attribute('dim') % rank}"} if rank else ())


LAYER_NORM = Operator(
    local="own form",
    fuses="rows",
    kernels=rows("layer_norm"),
    makes_gradients=frozenset({"input"}),
)
BATCH_NORM = Operator(
    _batch_norm,
    "whole",
    fuses="by channels",
    extras=_channel_statistics,
    writes=("running_mean", "running_var"),
)
GROUP_NORM = Operator(_group_norm, "whole", kernels=_group_norm_kernels, fuses="by channels")
SOFTMAX = Operator(_softmax, "own form", fuses="rows")

TABLE: Mapping[str, Operator] = {
    "aten.layer_norm": replace(LAYER_NORM, rule=_two_words, extras=_row_statistics(2)),
    "aten.rms_norm": replace(LAYER_NORM, rule=_one_word, extras=_row_statistics(1)),
    "aten.native_layer_norm": Operator(
        _two_words, kernels=rows("layer_norm"), extras=_row_statistics(2), fuses="rows"
    ),
    "aten._fused_rms_norm": Operator(_one_word, extras=_row_statistics(1), fuses="rows"),
    "aten.batch_norm": replace(
        BATCH_NORM,
        local="own form",
        kernels=_batch_norm_kernels,
        calls="many in parts",
        keeps_channels=True,
    ),
    **aten(
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional "
        "_batch_norm_with_update _batch_norm_with_update_functional",
        BATCH_NORM,
    ),
    "aten.group_norm": replace(GROUP_NORM, local="own form"),
    "aten.native_group_norm": GROUP_NORM,
    "aten._weight_norm": Operator(_weight_norm),
    "aten.instance_norm": Operator(
        _instance_norm,
        extras=_repeated_weight,
        writes=("running_mean", "running_var"),
        fuses="by channels",
    ),
    **aten("softmax log_softmax", replace(SOFTMAX, kernels=rows("softmax"))),
    **aten("_softmax _log_softmax", SOFTMAX),
    "aten._safe_softmax": replace(SOFTMAX, unsupported=_whole_rows),
}
