"""Attention: batch, heads and query positions split; each device has all keys of its heads.

`b h q d, b h k d, b h k e -> b h q e`. A device that holds a part of the queries needs all keys
and values: their gather falls out of the layouts, since k is a factor that is never split while
q is. Grouped queries: the query's heads are (h r), h key heads with r queries each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardfold.operators.kernels import Access, Kernel, LocalWork, Values, memory_pass, way
from shardfold.operators.notation import TOKEN, Call, Rule
from shardfold.operators.operator import Extra, Operator


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
        notation["attn_mask"] = _mask(f"{grouped} q k", len(call.shape("attn_mask")))
    causal = bool(call.attribute("is_causal", False))
    work = tuple(f for f in (*batch, "h", "r", "q", "k", "d") if f in sizes or f in "qkd")
    return call.rule(
        notation,
        f"{grouped} q e",
        sizes=sizes,
        engine="matrix",
        flops=2.0 if causal else 4.0,
        over=work,
        whole=frozenset({"k", "d", "e"}),
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


def _causal_rows(call: Call) -> frozenset[str]:
    """A causal mask of a part of the queries begins at its first row."""
    return frozenset({"q"} if call.attribute("is_causal", False) else ())


def _is_materialised(shapes: Sequence[Sequence[int]], attributes: Mapping[str, Any]) -> bool:
    """Whether scores are written to memory: no fused kernel broadcasts the heads of keys.

    Where a call says that queries share them (`enable_gqa`), there is one.
    """
    query, key = shapes[:2]
    return len(query) > 2 and query[-3] != key[-3] and not attributes.get("enable_gqa", False)


def _kernels(work: LocalWork, phase: str) -> list[Kernel]:
    queries, keys, depth = work.factor("q"), work.factor("k"), work.factor("d")
    heads = work.operand_items(0) / (queries * depth)
    shapes = [kind.shape for kind in work.inputs]
    if _is_materialised(shapes, work.access.attributes):
        return _materialised(phase, heads, queries, keys, depth)
    is_causal = bool(work.access.attributes.get("is_causal", False))
    kind = "causal" if is_causal else "full"
    if 3 in work.trained:  # a mask without a gradient is as good as none
        kind = "bias"
    elif is_causal and work.inputs[0].shape[-3] != work.inputs[1].shape[-3]:
        kind = "shared"
    length = np.sqrt(queries * keys)
    return [Kernel(f"attention.{kind}.{way(phase)}", work.dtype, (heads, length, depth))]


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


def _extras(call: Call, access: Access) -> tuple[Extra, ...]:
    """The logarithm of each row's sum; or all of the softmax, where it is in memory."""
    if _is_materialised([kind.shape for kind in call.inputs], access.attributes):
        return (Extra(-1, 4.0 * call.shape("key")[-2] / call.results[0].shape[-1]),)
    return (Extra(-1, 4.0, 1),)


TABLE: Mapping[str, Operator] = {
    "aten.scaled_dot_product_attention": Operator(
        _attention,
        "own form",
        ranges=_causal_rows,
        kernels=_kernels,
        extras=_extras,
        memory="attention",
        makes_gradients=frozenset({"query", "key", "value"}),
        words={"h": "heads", "r": "queries", "q": "seq", "k": "keys"},
    ),
}
