"""Attention: heads and batch as they come; a part of the queries meets keys piece by piece.

Dropout of the weights is by global position; the fused kernels of torch draw their own. A kernel of
ours draws them as it goes along (`attention_kernels.py`), on a GPU, where it takes the call
(`operators.attention.drops_in_place`). Elsewhere the weights are computed in full.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardfold.operators.attention import drops_in_place
from shardfold.runtime.ops.counter_rng import (
    keep_mask,
    kernels_for,
    key_of,
    linear_positions,
    pieces_of,
)
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
    """In one kernel where there is one, else with all weights in memory."""
    scale = site.argument("scale")
    grouped = bool(site.argument("enable_gqa", False))
    given = site.position("attn_mask")
    low, high = site.part("q") if causal else (0, 0)
    keys = site.inputs[1].shape[-2]
    # The weights have the result's dims, but for keys in place of features.
    *leads, rows, _ = pieces_of(site.results[0])
    pieces = [*leads, rows, [(keys, (0, keys))]]

    @cache
    def tables(device: torch.device) -> tuple[Tensor, Tensor]:
        """The first row of each batch and head in the whole, and the places of rows from there."""
        whole = math.prod(size for size, _ in rows)
        bases = linear_positions(leads, device) * whole
        return bases.reshape(-1), linear_positions([rows], device)

    def in_one_kernel(tensors: Sequence[Tensor], mask: Tensor | None, context: Context) -> Tensor:
        from shardfold.runtime.ops.attention_kernels import Drop, DroppedAttention

        if context.drawn is not None:
            keep_mask(pieces, p, context, site.number)
        query = tensors[0]
        factor = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
        drop = Drop(*tables(context.device), key_of(context, site.number), p, factor, causal, low)
        if mask is not None:
            mask = _in_four(mask.expand(*query.shape[:-1], keys))
        found: Tensor = DroppedAttention.apply(*(_in_four(t) for t in tensors), mask, drop)
        return found if query.dim() == 4 else found.squeeze(0)

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        mask = None if given is None else tensors[given]
        if kernels_for(context) is not None and 0 < p < 1:
            lowered = [_lowered(t) for t in tensors[:3]]
            every = lowered if mask is None else [*lowered, mask]
            kinds = [str(t.dtype).removeprefix("torch.") for t in every]
            strided = any(t.stride(-1) != 1 for t in every)
            if drops_in_place([t.shape for t in every], kinds, is_strided=strided):
                return in_one_kernel(lowered, mask, context)
        query, key, value = tensors[:3]
        if grouped and query.shape[-3] != key.shape[-3]:
            times = query.shape[-3] // key.shape[-3]
            key, value = (t.repeat_interleave(times, -3) for t in (key, value))
        factor = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
        scores = (query * factor) @ key.transpose(-1, -2)
        if causal:
            mask = _causal(low, high, keys, context.device)
        if mask is not None:
            is_bool = mask.dtype == torch.bool
            scores = scores.masked_fill(~mask, -math.inf) if is_bool else scores + mask
        weights = torch.ops.aten._safe_softmax(scores, -1)  # a row that sees nothing gives zeros
        return dropped(weights, pieces, p, context, site.number) @ value

    return call


def _in_four(tensor: Tensor) -> Tensor:
    """With a batch and heads before rows and features."""
    return tensor[(None,) * (4 - tensor.dim())]


TABLE: Mapping[str, Callable[[Site], Local]] = {
    "aten.scaled_dot_product_attention": _attention,
}
