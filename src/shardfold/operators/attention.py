"""Attention: batch, heads and positions split.

`b h q d, b h k d, b h k e -> b h q e`. A device that holds a part of the queries needs all keys
and values: their gather falls out of the layouts, since k is never split by itself while q is.
Grouped queries: the query's heads are (h r), h key heads with r queries each.

Where an axis splits queries and keys together (`ring`), keys and values go round: each device
meets its queries with the piece that it has while the next one comes, and what the pieces give is
put together by the logarithms of their sums. Backward, the gradients of keys and values go round
behind them. Of a causal mask the last device would have most to do, so each takes an early and a
late piece of queries and keys for as long as the operator runs, by all-to-all there and back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shardfold.graph import TensorType
from shardfold.operators.kernels import Access, Kernel, LocalWork, Values, memory_pass, way
from shardfold.operators.notation import TOKEN, Call, Exchange, Phase, Rule
from shardfold.operators.operator import Extra, Operator

WIDEST = 256  # features of a head in FlashAttention
HALVES = ("float16", "bfloat16")  # which it multiplies in
WIDEST_DROPPED = 128  # features of a head in the runner's kernel that draws dropout by position


def _attention(call: Call) -> Rule:
    """scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, ...)."""
    query, key = call.shape("query"), call.shape("key")
    batch = [f"b{i}" if i else "b" for i in range(len(query) - 3)]
    sizes = dict(zip(batch, query, strict=False))
    heads = "h"
    if len(query) > 2:
        shared = key[-3]
        sizes["h"] = shared
        if query[-3] != shared:
            sizes["r"] = query[-3] // shared
            heads = "(h r)" if shared > 1 else "r"
    lead = " ".join(batch)
    grouped = f"{lead} {heads}" if len(query) > 2 else ""
    plain = f"{lead} h" if len(query) > 2 else ""
    notation = {
        "query": f"{grouped} q d",
        "key": f"{plain} k d",
        "value": f"{plain} k e",
    }
    if call.has("attn_mask"):
        # Its keys stay where they are while others go round.
        notation["attn_mask"] = _mask(f"{grouped} q j", len(call.shape("attn_mask")))
    causal = bool(call.attribute("is_causal", False))
    goes_round = _goes_round(call)
    sizes |= {"c": min(query[-2], key[-2])} if goes_round else {}
    work = tuple(f for f in (*batch, "h", "r", "q", "k", "d") if f in sizes or f in "qkd")
    return call.rule(
        notation,
        f"{grouped} q e",
        sizes=sizes,
        engine="matrix",
        flops=2.0 if causal else 4.0,
        over=work,
        whole=frozenset({"k", "d", "e"} | ({"j"} if call.has("attn_mask") else set())),
        joint={"c": ("q", "k")} if goes_round else {},
        exchanges=_exchanges(call, lead, causal) if goes_round else (),
        skewed=frozenset({"q"}) if causal else frozenset(),
        saves=("query", "key", "value", "attn_mask"),
        copied=("query", "key", "value", "attn_mask"),  # scaled or repeated, by some kernels
        saves_results=True,
        backward=2.5,
    )


def _mask(full: str, dims: int) -> str:
    """The mask aligns with `... heads q k` from the right."""
    tokens = [f"({merged})" if merged else single for merged, single in TOKEN.findall(full)]
    return " ".join(tokens[len(tokens) - dims :])


def _goes_round(call: Call) -> bool:
    """Whether keys can go round: weights are neither dropped nor written to memory whole."""
    masked = call.has("attn_mask") and call.inputs[call.position("attn_mask")].dtype != "bool"
    dropped = bool(call.attribute("dropout_p", 0.0))
    return not (masked or dropped or _is_materialised(call.inputs, call.op.attributes))


def _exchanges(call: Call, lead: str, causal: bool) -> tuple[Exchange, ...]:
    """Keys and values round, their gradients behind them; of a causal mask, the deal around both.

    The gradients' last hop is the one home, after all work.
    """
    query, value, item = call.shape("query"), call.shape("value"), call.inputs[0].item_bytes
    heads = lead.split() + (["h"] if len(query) > 2 else [])
    shared = (*heads, "k")
    rows = (*heads, "r", "q") if len(query) > 2 and query[-3] != value[-3] else (*heads, "q")
    both = float(query[-1] + value[-1])

    def deal(over: tuple[str, ...], words: float, phase: Phase) -> tuple[Exchange, ...]:
        found = Exchange("all_to_all", "c", over, words, item, phase=phase)
        return (found,) if causal else ()

    pieces = Exchange("ring", "c", shared, both, item, beside=1)
    return (
        *deal(rows, float(query[-1]), "forward"),
        *deal(shared, both, "forward"),
        pieces,
        *deal(rows, float(value[-1]), "forward"),
        *deal(rows, float(value[-1]), "backward"),
        replace(pieces, phase="backward"),
        replace(pieces, phase="backward", beside=2),
        replace(pieces, phase="backward", beside=None),
        *deal(rows, float(query[-1]), "backward"),
        *deal(shared, both, "backward"),
    )


def _ranges(call: Call) -> frozenset[str]:
    """Of a causal mask a part of the queries is one range, and of what goes round."""
    return frozenset({"q", "c"} if call.attribute("is_causal", False) else {"c"})


def _is_materialised(
    inputs: Sequence[TensorType],
    attributes: Mapping[str, Any],
    *,
    is_strided: bool = False,
    is_compiled: bool = False,
) -> bool:
    """Whether scores are written to memory, as no fused kernel takes the call.

    None of PyTorch's reads an operand whose last dim is not the fastest in memory, as a learned
    bias that had its heads last. Only one shares the heads of keys among queries: it is asked to
    (`enable_gqa`), knows no mask, and its values are as wide as keys, and not too wide. None drops
    weights by position: one of the runner's does, which a compiler is not given.
    """
    shapes = [kind.shape for kind in inputs]
    if attributes.get("dropout_p"):
        dtypes = [kind.dtype for kind in inputs]
        return is_compiled or not drops_in_place(shapes, dtypes, is_strided=is_strided)
    query, key, value = shapes[:3]
    if is_strided or len(query) == 2 or query[-3] == key[-3]:
        return is_strided
    shares = len(shapes) == 3 and key[-1] == value[-1] <= WIDEST
    return not (shares and attributes.get("enable_gqa", False))


def drops_in_place(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[str], *, is_strided: bool
) -> bool:
    """Whether the runner's kernel takes a call with dropout (`runtime/ops/attention_kernels.py`).

    It draws by position while it goes along, so that weights need not be written to memory. What
    it asks for is known of the operands alone: halves, heads that are not too wide, and of masks
    only one that says yes or no.
    """
    query, key, value = shapes[:3]
    are_wide = max(query[-1], value[-1]) > WIDEST_DROPPED
    in_four = 3 <= len(query) <= 4 and query[:-3] == key[:-3] == value[:-3]
    return (
        not (is_strided or are_wide)
        and in_four
        and key[-3] == value[-3]
        and query[-3] % max(1, key[-3]) == 0
        and all(math.prod(shape) for shape in shapes)
        and dtypes[0] in HALVES
        and set(dtypes[:3]) == {dtypes[0]}
        and set(dtypes[3:]) <= {"bool"}
    )


def _kernels(work: LocalWork, phase: str) -> list[Kernel]:
    queries, keys, depth = work.factor("q"), work.factor("k"), work.factor("d")
    heads = work.operand_items(0) / (queries * depth)
    access, pieces = work.access, work.parts("c")
    told = {"is_strided": access.is_strided, "is_compiled": access.is_compiled}
    is_causal = bool(access.attributes.get("is_causal", False))
    if _is_materialised(work.inputs, access.attributes, **told):
        if access.attributes.get("dropout_p"):
            return _dropped(work, phase, (heads, queries, keys, depth))
        found = _materialised(phase, heads, queries, keys, depth)
        return [replace(kernel, times=pieces) for kernel in found]
    kind = "causal" if is_causal else "full"
    if 3 in work.trained:  # a mask without a gradient is as good as none
        kind = "bias"
    elif is_causal and work.inputs[0].shape[-3] != work.inputs[1].shape[-3]:
        kind = "shared"

    def kernel(kind: str, length: Values, times: float | Values = 1.0) -> Kernel:
        sizes = (heads, length, depth)
        return Kernel(f"attention.{kind}.{way(phase)}", work.dtype, sizes, times)

    alone = work.parts_alone("q")
    whole = kernel(kind, np.sqrt(queries * keys))
    if access.attributes.get("dropout_p"):  # bits are drawn for every weight that is seen
        seen = (0.5 if is_causal else 1.0) * heads * queries * keys
        drawn = memory_pass(2.0 * work.inputs[0].item_bytes * seen, work.dtype)
        return [whole, replace(drawn, family=f"dropped.{way(phase)}")]
    if not is_causal:
        merges = _merges(work, pieces - 1.0, 0.0 * pieces)
        if merges and _in_slices(work.inputs):
            slices = _sliced(phase, heads, queries, keys, depth, np.where(pieces > 1, pieces, 0.0))
            return [replace(whole, times=np.where(pieces > 1, 0.0, 1.0)), *slices, *merges]
        return [replace(whole, times=pieces), *merges]
    if np.all(pieces * alone == 1):
        return [whole]
    # The last device's queries: a square on the diagonal, and all that lies before it.
    others = pieces - 1.0 + (alone > 1)
    merges = _merges(work, others, np.minimum(pieces - 1, 1))
    seen = queries * keys * pieces * (2.0 * alone - 1.0) / alone
    if _in_slices(work.inputs):
        times = np.where(others > 0, pieces, 0.0)
        slices = _sliced(phase, heads, queries, seen / (2.0 * pieces * queries), depth, times)
        return [replace(whole, times=np.where(others > 0, 0.0, 1.0)), *slices, *merges]
    square = np.where(others > 0, queries * np.minimum(queries, keys), seen)
    length = np.sqrt(np.maximum(seen - square, 0.0) / 2.0 / np.maximum(others, 1.0))
    own = kernel(kind, np.sqrt(square))
    return [own, kernel("full", length, others), *merges]


def _merges(work: LocalWork, times: Values, dealt: Values) -> list[Kernel]:
    """Results of pieces put together, in float32; and the copies around a deal."""
    if not np.any(times):
        return []
    merged = (8.0 + work.results[0].item_bytes) * work.result_items(0)
    moved = 4.0 * (sum(work.operand_bytes(k) for k in range(3)) + work.result_bytes(0))
    sums, copies = ("float32", (merged,), times), (work.dtype, (moved,), dealt)
    return [Kernel("vector", *sums), Kernel("vector", *copies)]


def _materialised(
    phase: str, heads: Values, queries: Values, keys: Values, depth: Values
) -> list[Kernel]:
    """Two products and a softmax, in float32 whatever the operands are; the mask is two passes."""
    single = "float32"
    scores = heads * queries * keys
    there, back = (heads, queries, keys, depth), (heads, queries, depth, keys)
    masked = memory_pass(2.0 * 4.0 * scores, single)
    rows = (heads * queries, keys)
    if phase != "backward":
        softmax = Kernel("softmax.forward", single, rows)
        return [Kernel("bmm", single, there), masked, masked, softmax, Kernel("bmm", single, back)]
    turned = (heads, keys, depth, queries)
    return [
        *(Kernel("bmm", single, sizes) for sizes in (turned, there, back, turned)),
        Kernel("softmax.backward", single, rows),
        masked,
    ]


def _dropped(work: LocalWork, phase: str, sizes: tuple[Values, ...]) -> list[Kernel]:
    """The same in the operands' dtype, with dropout: what the runner writes as operators of torch.

    Queries are scaled first, keys and values put in the order of their dims. A softmax that gives
    zeros where a row sees nothing looks for such rows in passes of its own. A compiler puts passes
    together with the softmax.
    """
    heads, queries, keys, depth = sizes
    dtype, item, access = work.dtype, float(work.inputs[0].item_bytes), work.access
    scores = heads * queries * keys
    there, back = (heads, queries, keys, depth), (heads, queries, depth, keys)
    is_masked = bool(access.attributes.get("is_causal")) or len(work.inputs) > 3
    moved = memory_pass(2.0 * item * heads * (queries + 2.0 * keys) * depth, dtype)
    masked = [memory_pass(2.0 * item * scores, dtype)] * is_masked
    drop = memory_pass((2.0 * item + 1.0) * scores, dtype)
    rows = (heads * queries, keys)
    if phase != "backward":
        safe = [memory_pass(size * scores, dtype) for size in (item + 1.0, 1.0, 2.0 * item + 1.0)]
        softmax = Kernel("softmax.forward", dtype, rows)
        passes = [] if access.is_compiled else [*masked, *safe]
        return [
            moved,
            Kernel("bmm", dtype, there),
            *passes,
            softmax,
            drop,
            Kernel("bmm", dtype, back),
        ]
    turned = (heads, keys, depth, queries)
    return [
        *(Kernel("bmm", dtype, shape) for shape in (turned, there, back, turned)),
        drop,
        Kernel("softmax.backward", dtype, rows),
        *([] if access.is_compiled else masked),
        moved,
    ]


def _sliced(
    phase: str, heads: Values, queries: Values, keys: Values, depth: Values, pieces: Values
) -> list[Kernel]:
    """What goes round meets some rows at a time, as many as there are features.

    Backward, the scores are made once more.
    """
    rows = np.minimum(queries, depth)
    found = _materialised(phase, heads, rows, keys, depth)
    if phase == "backward":
        found += _materialised("forward", heads, rows, keys, depth)[:2]
    return [replace(kernel, times=pieces * np.ceil(queries / depth)) for kernel in found]


def _extras(call: Call, access: Access) -> tuple[Extra, ...]:
    """The logarithm of each row's sum; or the scores, where they are in memory."""
    told = {"is_strided": access.is_strided, "is_compiled": access.is_compiled}
    if _is_materialised(call.inputs, access.attributes, **told):
        return tuple(_weights(call) if call.attribute("dropout_p", 0.0) else _scores(call))
    return (Extra(-1, 4.0, 1), *(_round(call) if _goes_round(call) else ()))


def _scores(call: Call) -> Iterator[Extra]:
    """The weights and the operands in float32.

    Forward, the scores beside them; backward, the gradients of weights and scores.
    """
    each = call.shape("key")[-2] / call.results[0].shape[-1]
    yield Extra(-1, 4.0 * each)
    yield Extra(-1, 4.0 * each, life="forward")
    yield Extra(-1, 8.0 * each, life="backward")
    for of in range(3):
        yield Extra(of, 4.0 - min(4.0, call.inputs[of].item_bytes))  # beside what is kept anyway


def _weights(call: Call) -> Iterator[Extra]:
    """The weights, which of them were kept, and what is left; operands scaled or put in order.

    Forward, the scores beside them; backward, the gradients of weights and scores.
    """
    item = float(call.results[0].item_bytes)
    query, key = call.shape("query"), call.shape("key")
    each = key[-2] / call.results[0].shape[-1]
    yield Extra(-1, (item + 1.0 + item) * each)
    yield Extra(-1, item * each, life="forward")
    yield Extra(-1, 2.0 * item * each, life="backward")
    many = math.prod(query[:-2]) / math.prod(key[:-2])  # heads that share one
    for of, times in enumerate((1.0, many, many)):
        yield Extra(of, item * times)


def _round(call: Call) -> Iterator[Extra]:
    """Where keys go round: a piece that is met and one that comes, and sums in float32.

    Backward, gradients go round behind them, and shared heads are copied for all that share them.
    Of a causal mask, results are kept as they were dealt; backward, their gradients are, too. Where
    rows are met in slices, their scores are written to memory, no more than there are keys for
    every head; keys and values are in float32 then.
    """
    item = float(call.results[0].item_bytes)
    query, key = call.shape("query"), call.shape("key")
    many = math.prod(query[:-2]) / math.prod(key[:-2])  # heads that share one
    in_slices = _in_slices(call.inputs)
    copied = 2.0 * many * item if many > 1 and not in_slices else 0.0
    for of in (1, 2):
        yield Extra(of, 2.0 * item, life="forward", factor="c")
        yield Extra(of, 5.0 * item + 8.0 + copied, life="backward", factor="c")
    yield Extra(-1, 8.0 + item, life="forward", factor="c")
    yield Extra(0, 4.0 + item, life="backward", factor="c")
    if call.attribute("is_causal", False):
        yield Extra(-1, item, factor="c")
        yield Extra(-1, item, life="backward", factor="c")
    if in_slices:
        yield Extra(1, (2.0 + 2.0) * 4.0 * many, life="forward", factor="c")
        yield Extra(1, (2.0 + 5.0) * 4.0 * many, life="backward", factor="c")


def _in_slices(inputs: Sequence[TensorType]) -> bool:
    """Whether rows that meet a piece do so a few at a time: no fused kernel gives their sums.

    Kernels that know a mask, or float32, or wide heads, give results alone.
    """
    query, value = inputs[0], inputs[2]
    is_wide = max(query.shape[-1], value.shape[-1]) > WIDEST
    return len(inputs) > 3 or is_wide or query.dtype not in HALVES


TABLE: Mapping[str, Operator] = {
    "aten.scaled_dot_product_attention": Operator(
        _attention,
        "own form",
        ranges=_ranges,
        kernels=_kernels,
        extras=_extras,
        memory="attention",
        makes_gradients=frozenset({"query", "key", "value"}),
        words={"h": "heads", "r": "queries", "q": "seq", "k": "keys", "c": "ring"},
    ),
}
