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
