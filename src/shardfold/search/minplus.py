"""Min-plus products of tables, in tiles that stay in cache, with equal rows computed once.

Many configurations of an operator leave its result in the same layout, so their rows towards a
reader are equal. A min-plus product then needs one of each kind along the axes that stay, and only
the least of each kind along the axis that goes.

`product` is the min-plus product of two matrices that share their first axis,

    out[..., a, b] = min over v of left[..., v, a] + right[..., v, b],

and `minimise` is the same for any number of tables of any rank. Both build a small part of the
joint table at a time, so memory is one tile, work is the size of the joint table, and the tile
stays in the second-level cache.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardfold.search.interning import Array, Ints

_FEWER = 0.8
"""Merging pays when at most this part of the rows is distinct."""

_WEIGHTS = np.random.default_rng(0).random(4096)


@dataclass(frozen=True, slots=True, eq=False)
class Alike:
    """Rows in kinds: the first row of each kind, and each row's kind."""

    first: Ints
    kind: Ints
    order: Ints
    starts: Ints

    @staticmethod
    def find(table: Array) -> Alike | None:
        """Equal rows of a matrix; None where too few are equal.

        Rows are sorted by a weighted sum, and then compared in full.
        """
        rows, columns = table.shape
        if columns > len(_WEIGHTS):
            return None
        sums = table @ _WEIGHTS[:columns].astype(table.dtype)
        order = sums.argsort(kind="stable")
        ordered = sums[order]
        new = np.empty(rows, dtype=bool)
        new[:1] = True
        np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
        starts = new.nonzero()[0]
        if len(starts) > _FEWER * rows:
            return None
        first = order[starts]
        kind = np.empty(rows, dtype=np.int64)
        kind[order] = new.cumsum()
        kind -= 1
        alike = first.take(kind)
        # Along memory: the table is as often a transpose as not.
        if table.flags.c_contiguous:
            same = table.take(alike, axis=0) == table
        else:
            same = table.T.take(alike, axis=1) == table.T
        return Alike(first, kind, order, starts) if same.all() else None

    def least(self, table: Array) -> Array:
        """The minimum over the rows of each kind."""
        return np.asarray(np.minimum.reduceat(table.take(self.order, axis=0), self.starts, axis=0))


_TILE = 1 << 16
"""Entries of the joint table built at a time: half a MiB, inside the second-level cache."""

_AT_ONCE = 1 << 15
"""Joint tables up to this many entries are built whole: fewer calls beat less memory."""

_FEW = 1 << 12
"""Joint tables up to this many entries are added up without matrix products: fewer calls."""

_STRIP = 1 << 12
"""Entries of the result that a tile works on: 32 KiB, near the first-level cache."""

_WORTH_PRUNING = 1 << 17
"""Joint entries from which looking for values that the best on average dominates pays."""

_WORTH_SEARCHING = 1 << 18
"""Joint entries from which looking for values that others dominate pays, too."""

_PROMISING = 0.8
"""More dominators are tried where the first leaves at most this part of the values."""

_DOMINATORS = 8
_PATIENCE = 3
"""How many dominators are tried, and how many in a row may find nothing before we stop."""

_scratch = threading.local()


def product(left: Array, right: Array) -> Array:
    """Min-plus product over the shared axis -2; leading axes broadcast."""
    if left.ndim == 2 and right.ndim == 2:
        return product_of(left, right)
    lead = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    left = np.broadcast_to(left, lead + left.shape[-2:])
    right = np.broadcast_to(right, lead + right.shape[-2:])
    out = np.empty((*lead, left.shape[-1], right.shape[-1]))
    for at in np.ndindex(*lead):
        out[at] = product_of(left[at], right[at])
    return out


def product_of(left: Array, right: Array) -> Array:
    """The same of two matrices."""
    rows, columns = left.shape[1], right.shape[1]
    entries = left.size * columns
    if entries <= _FEW:
        # In this order even where both are transposes, or the minimum is taken sum by sum.
        joint = np.add(left[:, :, None], right[:, None], order="C")
        return np.asarray(np.minimum.reduce(joint))
    if entries > _WORTH_PRUNING and left.dtype == np.float64:  # else the product costs less
        count = len(left)
        keep = undominated(left, right, 1)
        left, right = left[keep], right[keep]
        if entries > _WORTH_SEARCHING and len(keep) <= _PROMISING * count:
            keep = undominated(left, right)
            left, right = left[keep], right[keep]
    # The longer axis goes last, since what lies along memory is worked on in one go.
    if rows > columns:
        return _multiply(right, left).T
    return _multiply(left, right)


def _multiply(left: Array, right: Array) -> Array:
    """The product strip by strip of its rows, some values of the shared axis at a time.

    The sums are matrix products, one for each value: a column (left, 1) times a row (1, right).
    That rounds once, as an addition does; broadcasting an addition takes three times as long.
    """
    count, rows, columns = left.shape[0], left.shape[1], right.shape[1]
    kind = left.dtype
    first, second = np.ones((count, rows, 2), kind), np.ones((count, 2, columns), kind)
    first[:, :, 0], second[:, 1] = left, right
    if count * rows * columns <= _AT_ONCE:
        return np.asarray(np.minimum.reduce(first @ second))
    out = np.empty((rows, columns), kind)
    room = _TILE * 8 // kind.itemsize
    strip = max(1, min(rows, _STRIP // columns))
    step = max(2, min(count, room // (strip * columns)))
    tile = _tile(max(step * strip * columns, room)).view(kind)
    for top in range(0, rows, strip):
        part = out[top : top + strip]
        for low in range(0, count, step):
            some = first[low : low + step, top : top + strip]
            joint = tile[: len(some) * part.size].reshape(len(some), *part.shape)
            np.matmul(some, second[low : low + step], out=joint)
            if low:
                np.minimum(part, np.minimum.reduce(joint, axis=0), out=part)
            else:
                np.minimum.reduce(joint, axis=0, out=part)
    return out


def _tile(entries: int) -> Array:
    """Room for a joint tile, kept from call to call: fresh memory costs more than the sums."""
    tile: Array | None = getattr(_scratch, "tile", None)
    if tile is None or tile.size < entries:
        tile = _scratch.tile = np.empty(entries)
    return tile


def undominated(left: Array, right: Array, tries: int = _DOMINATORS) -> Ints:
    """Indices of the shared axis that can still be the minimum, the lowest of equals first.

    v is dominated by w when left[v] - left[w] and right[v] - right[w] have minima that sum to at
    least zero: then w is as good whatever the two other choices are. Only a few of the best on
    average are tried as w, so the test costs a small part of the product that it shrinks.
    """
    alive, rows, columns = np.arange(len(left)), left, right
    score, idle = _mean(left) + _mean(right), 0
    for w in score.argsort(kind="stable")[:tries].tolist():
        if w not in alive:
            continue
        margin = np.minimum.reduce(rows - left[w], axis=1)
        margin += np.minimum.reduce(columns - right[w], axis=1)
        kept = (margin < 0.0) | (alive == w)
        if not kept.all():
            alive, rows, columns = alive[kept], rows[kept], columns[kept]
            idle = 0
        elif (idle := idle + 1) == _PATIENCE:
            break
    return alive


def _mean(table: Array) -> Array:
    """The mean of each row, as a product: several times faster than a reduction of short rows."""
    columns = table.shape[1]
    return np.asarray(table @ np.full(columns, 1.0 / columns))


def minimise(tables: Sequence[Array], shape: tuple[int, ...]) -> Array:
    """Minimum over the last axis of the broadcast sum of `tables`, which has shape `shape`.

    Each table has as many axes as `shape`, of full length or of length 1.
    """
    out_shape, count = shape[:-1], shape[-1]
    tables = sorted(tables, key=lambda table: table.size)
    if math.prod(shape) <= _TILE:
        joint = _sum(tables)
        joint = joint if joint.shape == shape else np.broadcast_to(joint, shape)
        return np.asarray(np.minimum.reduce(joint, axis=-1))
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
    return max(1, _TILE // (2 * max(below, 1)))
