"""Choices that make no difference to a table: equal rows, found once and computed with once.

Many configurations of an operator leave its result in the same layout, so their rows towards a
reader are equal. A min-plus product then needs one of each kind along the axes that stay, and only
the least of each kind along the axis that goes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardfold.search.kinds import Array, Ints

_FEWER = 0.8
"""Merging pays when at most this part of the rows is distinct."""

_WEIGHTS = np.random.default_rng(0).random(4096)


@dataclass(frozen=True, slots=True, eq=False)
class Alike:
    """Rows in kinds: the first row of each kind, and each row's kind."""

    first: Ints
    kind: Ints

    @staticmethod
    def find(table: Array) -> Alike | None:
        """Equal rows of a matrix; None where too few are equal.

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
        kind = np.empty(len(order), dtype=np.int64)
        kind[order] = np.cumsum(new) - 1
        return Alike(first, kind) if np.array_equal(table[first[kind]], table) else None

    def least(self, table: Array) -> Array:
        """The minimum over the rows of each kind."""
        order = np.argsort(self.kind, kind="stable")
        kinds = self.kind[order]
        starts = np.flatnonzero(np.concatenate([[True], kinds[1:] != kinds[:-1]]))
        return np.asarray(np.minimum.reduceat(table[order], starts, axis=0))
