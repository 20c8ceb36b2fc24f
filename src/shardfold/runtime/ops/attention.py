"""Attention: heads and batch as they come; a part of the queries meets keys piece by piece.

Dropout of the weights is by global position, for which they are computed in full: the fused kernels
draw their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfold.runtime.ops.counter_rng import pieces_of
from shardfold.runtime.ops.dropout import dropped
from shardfold.runtime.ops.local_op import Context, Local, Site
from shardfold.runtime.ops.ring import Deal, Ring, RingAttention


def _attention(site: Site) -> Local:
    causal, p = bool(site.argument("is_causal", False)), float(site.argument("dropout_p", 0.0))
    if p:
        return _with_dropout(site, p, causal)
    if site.axes("c") or (causal and site.axes("q")):
        return _in_pieces(site, causal)
    return site.invoke


def _in_pieces(site: Site, causal: bool) -> Local:
    """Keys go round the devices that have a part of queries and keys; or all of them are here."""
    axes, given = site.axes("c"), site.position("attn_mask")
    members = site.place.members(axes)
    at, in_balance = members.index(site.place.at), causal and len(members) > 1
    queries, keys = (
        Deal.of([site.part(base, each) for each in members], at, in_balance=in_balance)
        for base in "qk"
    )
    scale = site.argument("scale", 1 / math.sqrt(site.inputs[0].shape[-1]))
    ring = Ring(queries, keys, causal, scale, axes)

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        query, key, value = (_lowered(t) for t in tensors[:3])
        mask = None if given is None else tensors[given]
        return RingAttention.apply(query, key, value, mask, (ring, context.groups))

    return call


def _lowered(tensor: Tensor) -> Tensor:
    """As autocast gives it to attention."""
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


def _causal(low: int, high: int, keys: int, device: torch.device) -> Tensor:
    rows = torch.arange(low, high, device=device)[:, None]
    return torch.arange(keys, device=device)[None, :] <= rows


def _with_dropout(site: Site, p: float, causal: bool) -> Local:
    scale = site.argument("scale")
    grouped = bool(site.argument("enable_gqa", False))
    given = site.position("attn_mask")
    low, high = site.part("q") if causal else (0, 0)
    keys = site.inputs[1].shape[-2]
    # The weights have the result's dims, but for keys in place of features.
    pieces = [*pieces_of(site.results[0])[:-1], [(keys, (0, keys))]]

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        query, key, value = tensors[:3]
        if grouped and query.shape[-3] != key.shape[-3]:
            times = query.shape[-3] // key.shape[-3]
            key, value = (t.repeat_interleave(times, -3) for t in (key, value))
        factor = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
        scores = (query * factor) @ key.transpose(-1, -2)
        mask = None if given is None else tensors[given]
        if causal:
            mask = _causal(low, high, keys, context.device)
        if mask is not None:
            is_bool = mask.dtype == torch.bool
            scores = scores.masked_fill(~mask, -math.inf) if is_bool else scores + mask
        weights = torch.ops.aten._safe_softmax(scores, -1)  # a row that sees nothing gives zeros
        return dropped(weights, pieces, p, context, site.number) @ value

    return call


TABLE: Mapping[str, Callable[[Site], Local]] = {
    "aten.scaled_dot_product_attention": _attention,
}
