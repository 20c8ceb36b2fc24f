"""Interning: which arrays of a sequence are equal, so that folding computes each once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

_SAMPLE = 64

_CHUNK = 1 << 14
"""Positions added up at a time, so that the indices between stay in cache."""

_FEW = 2_000
"""Below this many entries, looking them up one by one beats laying all tables end to end."""

_AN_ARRAY, _A_POSITION = 2_000, 64
"""Entries laid end to end in the time that an array, or a position, takes when looked up apart."""


@dataclass(frozen=True, slots=True, eq=False)
class Kinds:
    """A sequence of arrays as its distinct arrays and, per position, which of them it is.

    Arrays are the same when they are the same object, and else when shape and content agree.
    """

    of: Ints
    tables: tuple[Array, ...]
    first: tuple[int, ...]
    _offset: Ints = field(init=False)
    _stride: Ints = field(init=False)

    def __post_init__(self) -> None:
        """Where each position's array begins when all are laid end to end, and its row length."""
        if len(self.of) < _FEW:
            return
        lengths = np.array([table.size for table in self.tables], dtype=np.int64)
        rows = np.array([table.shape[-1] if table.ndim else 1 for table in self.tables])
        object.__setattr__(self, "_offset", (np.cumsum(lengths) - lengths).take(self.of))
        object.__setattr__(self, "_stride", rows.take(self.of))

    @staticmethod
    def find(arrays: Sequence[Array]) -> Kinds:
        """The distinct arrays of `arrays`; an object is looked at once however often it recurs."""
        ids = np.fromiter(map(id, arrays), np.int64, len(arrays))
        _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
        seen: dict[tuple[object, ...], list[int]] = {}
        tables: list[Array] = []
        where: list[int] = []
        kind_of_object = np.zeros(len(first), np.int64)
        for rank in np.argsort(first, kind="stable").tolist():
            table = np.asarray(arrays[int(first[rank])], dtype=np.float64)
            bucket = seen.setdefault(_signature(table), [])
            kind = next((k for k in bucket if np.array_equal(tables[k], table)), None)
            if kind is None:
                kind = len(tables)
                tables.append(np.ascontiguousarray(table))
                where.append(int(first[rank]))
                bucket.append(kind)
            kind_of_object[rank] = kind
        return Kinds(kind_of_object[inverse.reshape(-1)], tuple(tables), tuple(where))

    def taken(self, positions: Ints) -> Kinds:
        """The sequence of the arrays at some positions, with every distinct one among them."""
        of = self.of[positions]
        first = np.zeros(len(self.tables), np.int64)
        first[of[::-1]] = np.arange(len(of))[::-1]
        return Kinds(of, self.tables, tuple(first.tolist()))

    def arrays(self) -> tuple[Array, ...]:
        """The sequence itself."""
        return tuple(map(self.tables.__getitem__, self.of.tolist()))

    def at(self, *indices: Ints) -> Array:
        """The entry of each position's array at that position's indices."""
        if len(self.of) < _FEW:
            return np.array(self._entries(*indices))
        flat = np.concatenate([table.reshape(-1) for table in self.tables])
        place = indices[-1] + self._offset
        if len(indices) == 2:
            place += indices[0] * self._stride
        return np.asarray(flat.take(place))

    def _entries(self, *indices: Ints) -> list[float]:
        """The entries one by one, which is faster while they are few."""
        tables, kinds = self.tables, self.of.tolist()
        if len(indices) == 1:
            return [tables[k].item(x) for k, x in zip(kinds, indices[0].tolist(), strict=True)]
        ends = zip(kinds, indices[0].tolist(), indices[1].tolist(), strict=True)
        return [tables[k].item(x, y) for k, x, y in ends]

    def _by_kind(self, *indices: Ints) -> Array:
        """The entries array by array."""
        found, order = np.empty(len(self.of)), self.of.argsort(kind="stable")
        ends = np.bincount(self.of, minlength=len(self.tables)).cumsum()[:-1]
        for table, where in zip(self.tables, np.split(order, ends), strict=True):
            found[where] = table[tuple(index[where] for index in indices)]
        return found

    def total(self, choice: Ints, ends: Ints | None = None) -> float:
        """The sum of each position's entry at its own choice, or at the choices of its two ends."""
        if len(self.of) < _FEW:
            indices = (choice,) if ends is None else (choice[ends[:, 0]], choice[ends[:, 1]])
            return sum(self._entries(*indices))
        apart = _AN_ARRAY * len(self.tables) + _A_POSITION * len(self.of)
        if sum(table.size for table in self.tables) > apart:
            indices = (choice,) if ends is None else (choice[ends[:, 0]], choice[ends[:, 1]])
            found = self._by_kind(*indices)
            starts = range(0, len(found), _CHUNK)
            return math.fsum(found[low : low + _CHUNK].sum() for low in starts)
        flat = np.concatenate([table.reshape(-1) for table in self.tables])
        sums = []
        for low in range(0, len(self.of), _CHUNK):
            part = slice(low, low + _CHUNK)
            if ends is None:
                place = choice[part] + self._offset[part]
            else:
                place = choice.take(ends[part, 0])
                place *= self._stride[part]
                place += choice.take(ends[part, 1])
                place += self._offset[part]
            sums.append(flat.take(place).sum())
        return math.fsum(sums)

    def blended(self, other: Kinds | None, weights: tuple[float, float]) -> Kinds:
        """Position by position, a weighted sum of these arrays and the other's."""
        if other is None:
            return Kinds(self.of, tuple(weights[0] * table for table in self.tables), self.first)
        base = max(len(other.tables), 1)
        pairs, first, of = np.unique(
            self.of * base + other.of, return_index=True, return_inverse=True
        )
        tables = tuple(
            weights[0] * self.tables[pair // base] + weights[1] * other.tables[pair % base]
            for pair in pairs.tolist()
        )
        return Kinds(of.reshape(-1), tables, tuple(first.tolist()))

    def cut(self, of: Ints, first: Ints, kept: Sequence[Ints]) -> Kinds:
        """Vectors with the entries `kept` of each class, one table a class.

        `of` is the class of each position, and `first` a position of each.
        """
        numbers = zip(self.of[first].tolist(), kept, strict=True)
        return Kinds(of, tuple(self.tables[n][k] for n, k in numbers), tuple(first.tolist()))

    def cut_pairs(self, of: Ints, kept: Sequence[Ints]) -> Kinds:
        """Matrices with the rows and columns `kept` of the two classes of each position."""
        code = (self.of * len(kept) + of[:, 0]) * len(kept) + of[:, 1]
        _, first, new = np.unique(code, return_index=True, return_inverse=True)
        numbers = zip(self.of[first].tolist(), of[first].tolist(), strict=True)
        tables = tuple(self.tables[n][np.ix_(kept[a], kept[b])] for n, (a, b) in numbers)
        return Kinds(new.reshape(-1), tables, tuple(first.tolist()))


def _signature(table: Array) -> tuple[object, ...]:
    """Cheap to compute and equal for equal arrays, so that few pairs need a full comparison."""
    flat = table.reshape(-1)
    stride = max(1, flat.size // _SAMPLE)
    return table.shape, flat[::stride].tobytes()
