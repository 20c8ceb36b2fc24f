"""Normalisations and softmax: a split of the normalised factor reduces its statistics.

`... d, d, d -> ... d`: rows split freely. Where d is split, every row's sums are all-reduced, two
words a row for a mean and a variance (in float64: their difference is what counts), one for a mean
square; for a softmax one for the maximum, and then one for the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from shardfold.graph import TensorType
from shardfold.operators.call import Call
from shardfold.operators.notation import Exchange, Phase, Rule

EXACT_BYTES = 8  # a float64


def statistics_bytes(kind: TensorType) -> int:
    """Sums are kept and sent in the dtype of what is summed, but in no less than four bytes."""
    return max(4, kind.item_bytes)


def _sums(
    call: Call, factors: Iterable[str], rows: Iterable[str], forward: float, backward: float
) -> tuple[Exchange, ...]:
    """All-reduces of so many words a row in each pass, for each factor that may be split.

    Words are those of the statistics' dtype; those of backward serve the gradient of the input.
    """
    over, size = tuple(rows), statistics_bytes(call.inputs[0])
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


def _two_words(call: Call) -> Rule:
    return _layer_norm(call, _mean_and_variance(call), 2.0)


def _one_word(call: Call) -> Rule:
    return _layer_norm(call, 1.0, 1.0)


BATCH_NORMS = (
    "batch_norm",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_batch_norm_with_update",
    "_batch_norm_with_update_functional",
)
SOFTMAXES = ("softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax")

TABLE: Mapping[str, Callable[[Call], Rule]] = {
    "aten.layer_norm": _two_words,
    "aten.native_layer_norm": _two_words,
    "aten.rms_norm": _one_word,
    "aten._fused_rms_norm": _one_word,
    **{f"aten.{name}": _batch_norm for name in BATCH_NORMS},
    "aten.group_norm": _group_norm,
    "aten.native_group_norm": _group_norm,
    "aten.instance_norm": _instance_norm,
    **{f"aten.{name}": _softmax for name in SOFTMAXES},
}
