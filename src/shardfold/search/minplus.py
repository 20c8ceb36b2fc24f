"""The kernels: sums of tables minimised over one axis, in pieces that stay in cache.

`product` is the min-plus product of two matrices that share their first axis,

    out[..., a, b] = min over v of left[..., v, a] + right[..., v, b],

and `minimise` is the same for any number of tables of any rank. Both add one slice per value of
the axis that goes away to a running minimum, so the joint table is never stored: memory is two
tiles, work is the size of the joint table, and each tile stays in the second-level cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardfold.search.kinds import Array, Ints

_TILE = 1 << 15
"""Entries of a tile: 256 KiB, so that the minimum and its addend fit in cache together."""

_AT_ONCE = 1 << 17
"""Joint tables up to this many entries are built whole: fewer calls beat less memory."""

_WORTH_MERGING = 1 << 17
_WORTH_PRUNING = 1 << 18
"""Joint entries from which looking for equal, and for dominated, values pays."""

_FEWER = 0.8
"""Merging equal rows pays when at most this part of them is distinct."""

_WEIGHTS = np.random.default_rng(0).random(4096)

_DOMINATORS = 8
_PATIENCE = 3
"""How many dominators are tried, and how many in a row may find nothing before we stop."""


def product(left: Array, right: Array) -> Array:
    """Min-plus product over the shared axis -2; leading axes broadcast."""
    if left.ndim == 2 and right.ndim == 2:
        return _product(left, right)
    lead = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    left = np.broadcast_to(left, lead + left.shape[-2:])
    right = np.broadcast_to(right, lead + right.shape[-2:])
    out = np.empty((*lead, left.shape[-1], right.shape[-1]))
    for at in np.ndindex(*lead):
        out[at] = _product(left[at], right[at])
    return out


def _product(left: Array, right: Array) -> Array:
    count, rows, columns = left.shape[0], left.shape[1], right.shape[1]
    if count * rows * columns <= _WORTH_MERGING:
        return _multiply(left, right)
    left, right = _merged(left, right)
    row_classes, column_classes = equal_rows(left.T), equal_rows(right.T)
    if row_classes is not None:
        left = left[:, row_classes[0]]
    if column_classes is not None:
        right = right[:, column_classes[0]]
    if left.size * right.shape[1] > _WORTH_PRUNING:
        keep = undominated(left, right)
        left, right = left[keep], right[keep]
    out = _multiply(left, right)
    if row_classes is not None:
        out = out[row_classes[1]]
    return out[:, column_classes[1]] if column_classes is not None else out


def _multiply(left: Array, right: Array) -> Array:
    if left.size * right.shape[1] <= _AT_ONCE:
        whole: Array = (left[:, :, None] + right[:, None, :]).min(axis=0)
        return whole
    if left.shape[1] < right.shape[1]:
        return np.ascontiguousarray(_accumulate(right, left).T)
    return _accumulate(left, right)


def _merged(left: Array, right: Array) -> tuple[Array, Array]:
    """One value of the shared axis for all that have the same row on one side.

    Many configurations leave a tensor in the same layout: their rows towards its reader are equal,
    so only the minimum of their rows on the other side matters.
    """
    on_left, on_right = equal_rows(left), equal_rows(right)
    if on_left is not None and (on_right is None or len(on_left[0]) < len(on_right[0])):
        return left[on_left[0]], _least(right, on_left[1])
    if on_right is not None:
        return _least(left, on_right[1]), right[on_right[0]]
    return left, right


def _least(table: Array, label: Ints) -> Array:
    """The minimum over the rows of each label."""
    order = np.argsort(label, kind="stable")
    labels = label[order]
    starts = np.flatnonzero(np.concatenate([[True], labels[1:] != labels[:-1]]))
    return np.asarray(np.minimum.reduceat(table[order], starts, axis=0))


def equal_rows(table: Array) -> tuple[Ints, Ints] | None:
    """One row number per distinct row and the label of every row; None where too few are equal.

    Rows are sorted by a weighted sum, and then compared in full.
    """
    if table.shape[1] > len(_WEIGHTS):
        return None
    sums = table @ _WEIGHTS[: table.shape[1]]
    order = sums.argsort(kind="stable")
    ordered = sums[order]
    new = np.empty(len(order), dtype=bool)
    new[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    first = order[new]
    if len(first) > _FEWER * len(order):
        return None
    label = np.empty(len(order), dtype=np.int64)
    label[order] = np.cumsum(new) - 1
    return (first, label) if np.array_equal(table[first[label]], table) else None


def _accumulate(left: Array, right: Array) -> Array:
    """The product by a running minimum over the shared axis, one tile of rows at a time."""
    rows, columns = left.shape[1], right.shape[1]
    out = np.empty((rows, columns))
    step = max(1, _TILE // columns)
    addend = np.empty((min(step, rows), columns))
    for top in range(0, rows, step):
        tile = out[top : top + step]
        scratch = addend[: len(tile)]
        part = left[:, top : top + step, None]
        np.add(part[0], right[0], out=tile)
        for v in range(1, len(left)):
            np.add(part[v], right[v], out=scratch)
            np.minimum(tile, scratch, out=tile)
    return out


def undominated(left: Array, right: Array) -> Ints:
    """Indices of the shared axis that can still be the minimum, the lowest of equals first.

    v is dominated by w when left[v] - left[w] and right[v] - right[w] have minima that sum to at
    least zero: then w is as good whatever the two other choices are. Only a few of the cheapest
    are tried as w, so the test costs a small part of the product that it shrinks.
    """
    alive = np.arange(len(left))
    score = left.min(axis=1) + right.min(axis=1) + left.mean(axis=1) + right.mean(axis=1)
    idle = 0
    for w in np.argsort(score, kind="stable")[:_DOMINATORS].tolist():
        if w not in alive:
            continue
        margin = (left[alive] - left[w]).min(axis=1) + (right[alive] - right[w]).min(axis=1)
        kept = alive[(margin < 0.0) | (alive == w)]
        idle = idle + 1 if len(kept) == len(alive) else 0
        alive = kept
        if idle == _PATIENCE:
            break
    return alive


def minimise(tables: Sequence[Array], shape: tuple[int, ...]) -> Array:
    """Minimum over the last axis of the broadcast sum of `tables`, which has shape `shape`.

    Each table has as many axes as `shape`, of full length or of length 1.
    """
    out_shape, count = shape[:-1], shape[-1]
    tables = sorted(tables, key=lambda table: table.size)
    if np.prod(shape) <= _AT_ONCE:
        return np.asarray(np.broadcast_to(_sum(tables), shape).min(axis=-1))
    first = [np.moveaxis(table, -1, 0) for table in tables]
    out = np.empty(out_shape)
    step = _rows(out_shape)
    for top in range(0, out_shape[0], step):
        tile = out[top : top + step]
        parts = [t[:, top : top + step] if t.shape[1] > 1 else t for t in first]
        scratch = np.empty_like(tile)
        for v in range(count):
            slices = [part[v] if len(part) > 1 else part[0] for part in parts]
            target = tile if v == 0 else scratch
            head = _sum(slices[:-1]) if len(slices) > 1 else np.zeros((1,) * tile.ndim)
            np.add(head, slices[-1], out=target)
            if v:
                np.minimum(tile, scratch, out=tile)
    return out


def _sum(tables: Sequence[Array]) -> Array:
    total = tables[0]
    for table in tables[1:]:
        total = total + table
    return total


def _rows(shape: tuple[int, ...]) -> int:
    below = int(np.prod(shape[1:], dtype=np.int64))
    return max(1, _TILE // max(below, 1))
