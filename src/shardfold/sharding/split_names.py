"""The split of an operator in words: `{"batch": 4, "heads": 8}`, for every configuration it has.

Configurations with equal words differ only in which axes do the work, or in whether a pending sum
passes: to a reader they are one split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardfold.cluster import Mesh
from shardfold.graph import Graph
from shardfold.sharding import Space, Subdims
from shardfold.sharding.factor_names import word, words_of

Split = dict[str, int]
Key = frozenset[tuple[str, int]]  # a split without the order of its words
Rows = NDArray[np.int64]  # some of a vertex's choices, in order
UNSPLIT = "unsplit"


def in_words(split: Mapping[str, int]) -> str:
    """A split as text.

    >>> in_words({"batch": 4, "heads": 8}), in_words({})
    ('batch/4 heads/8', 'unsplit')
    """
    return " ".join(f"{name}/{parts}" for name, parts in split.items()) or UNSPLIT


class Splits:
    """The splits of a graph's operators on a mesh."""

    def __init__(self, graph: Graph, subdims: Subdims, mesh: Mesh) -> None:
        self.graph, self.subdims, self.mesh = graph, subdims, mesh
        self._known: dict[object, dict[Key, tuple[Split, Rows]]] = {}

    @cached_property
    def words(self) -> dict[int, str]:
        """A word for every sub-dim that has one."""
        return words_of(self.graph, self.subdims)

    def of(self, index: int, space: Space, row: Sequence[int]) -> Split:
        """The split that one configuration of operator `index` makes."""
        names = self.names(index, space)
        parts: Split = {}
        for factor, axis in zip(row, self.mesh.axes, strict=True):
            if factor >= 0:
                parts[names[factor]] = parts.get(names[factor], 1) * axis.size
        return parts

    def offered(self, index: int, space: Space) -> dict[Key, tuple[Split, Rows]]:
        """Every distinct split of an operator, with the configurations that make it."""
        names = self.names(index, space)
        key = (space.configs.tobytes(), names)
        if key not in self._known:
            found: dict[Key, tuple[Split, list[int]]] = {}
            for number, row in enumerate(space.configs.tolist()):
                split = self.of(index, space, row)
                found.setdefault(frozenset(split.items()), (split, []))[1].append(number)
            self._known[key] = {k: (s, np.array(rows)) for k, (s, rows) in found.items()}
        return self._known[key]

    def names(self, index: int, space: Space) -> tuple[str, ...]:
        """A word for each factor of operator `index`."""
        identities = self.subdims.factors[index]
        return tuple(
            word(space.rule, factor, identity, self.words)
            for factor, identity in enumerate(identities)
        )
