"""Look-ups in a part of a table: rows that other devices hold give zeros."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from shardfold.capture import Slot
from shardfold.runtime.ops.local_op import Context, Local, Site, only, plain
from shardfold.runtime.ops.matrix import once


def _within(index: Tensor, low: int, high: int, size: int) -> tuple[Tensor, Tensor]:
    """Indices counted from `low`, and which of them are in the part."""
    positive = index.where(index >= 0, index + size)
    mine = (positive >= low) & (positive < high)
    return (positive - low).clamp(0, max(high - low - 1, 0)), mine


def _lookup(site: Site, factor: str, name: int, before: int, after: int) -> Local:
    """A look-up whose result has `before` dims, then the index's own, then `after`."""
    low, high = site.part(factor)
    size = site.size(factor)

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        given = list(tensors)
        given[name], mine = _within(given[name], low, high, size)
        mask = mine.reshape([*[1] * before, *mine.shape, *[1] * after])
        return only(site.invoke(given, context), mask)

    return call


def _embedding(site: Site) -> Local:
    if site.argument("scale_grad_by_freq", False) or site.argument("sparse", False):
        if site.is_split:
            raise site.unsupported("scale_grad_by_freq and sparse gradients")
        return site.invoke
    if not site.axes("v"):
        return site.invoke
    low, high = site.part("v")
    size = site.size("v")
    padding = site.argument("padding_idx", -1)
    local = padding - low if low <= padding < high else -1
    table, index = site.position("weight"), site.position("indices")
    assert table is not None
    assert index is not None

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        given = list(tensors)
        given[index], mine = _within(given[index], low, high, size)
        rows = site.invoke(given, context, padding_idx=local)
        return only(rows, mine.unsqueeze(-1))

    return call


def _embedding_bag(site: Site) -> Local:
    """Rows of other devices count as nothing."""
    if not site.axes("v"):
        return site.invoke
    low, high = site.part("v")
    size, is_mean = site.size("v"), site.argument("mode") == 1

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        table, index = tensors
        rows, mine = _within(index, low, high, size)
        added = F.embedding_bag(rows, table, mode="sum", per_sample_weights=mine.to(table.dtype))
        return added / index.shape[1] if is_mean else added

    return call


def _index_select(site: Site) -> Local:
    if not site.axes("v"):
        return plain(site)
    rank = site.inputs[0].rank
    dim = site.argument("dim") % rank
    index = site.position("index")
    assert index is not None
    return _lookup(site, "v", index, dim, rank - dim - 1)


def _index(site: Site) -> Local:
    slots = [(k, v) for k, v in enumerate(site.argument("indices")) if isinstance(v, Slot)]
    split = [(k, slot) for k, slot in slots if site.axes(f"v{k}")]
    if not split:
        return plain(site)
    dim, slot = split[0]
    return _lookup(site, f"v{dim}", slot.position, dim, site.inputs[0].rank - dim - 1)


def _gather(site: Site) -> Local:
    if not site.axes("v"):
        return plain(site)
    index = site.position("index")
    if index is None:
        raise site.unsupported("rows in parts")
    return _lookup(site, "v", index, 0, 0)


def _scatter(site: Site) -> Local:
    """Sums of a part of the rows: what was there before is added by one device alone."""
    if site.axes("v", *(f"v{k}" for k in range(site.inputs[0].rank))):
        raise site.unsupported("rows in parts")
    prepared = once(site, "self", *site.rule.rule.reduced)

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        return site.invoke(prepared(tensors), context)

    return call


TABLE: Mapping[str, Callable[[Site], Local]] = {
    "aten.embedding": _embedding,
    "shardfold.embedding_bag": _embedding_bag,
    "aten.index_select": _index_select,
    "aten.index": _index,
    "aten.gather": _gather,
    "aten.take_along_dim": _gather,
    **{
        f"aten.{name}": _scatter
        for name in "scatter scatter_add scatter_reduce index_add index_copy index_put".split()
    },
}
