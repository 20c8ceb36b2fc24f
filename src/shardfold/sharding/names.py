"""Factors and splits in plain words: batch, seq, heads, vocab, in, out.

A sub-dim has one identity across the graph, so a word that one operator knows (heads, from
attention) serves everywhere the sub-dim goes (the out features of the query projection).

The split of an operator in words is `{"batch": 4, "heads": 8}`, for every configuration it has.
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
from shardfold.operators import REGISTRY
from shardfold.sharding import Space, SubdimRule, Subdims

# What the factor is to the operator itself, where the sub-dim has no better name.
LOCAL: Mapping[str, str] = {
    "m": "in",
    "n": "out",
    "c": "in",
    "h": "height",
    "w": "width",
    "t": "time",
    "g": "groups",
    "d": "features",
    "e": "hidden",
    "v": "vocab",
}


def batch_classes(graph: Graph, subdims: Subdims) -> frozenset[int]:
    """The identities of the leading dim of every input: what data parallelism splits."""
    return frozenset(
        subdims.classes[i][0]
        for i, tensor in enumerate(graph.tensors)
        if tensor.role == "input" and subdims.classes[i]
    )


def words_of(graph: Graph, subdims: Subdims) -> dict[int, str]:
    """A word for every sub-dim that some operator or input can name."""
    words = dict.fromkeys(batch_classes(graph, subdims), "batch")
    order = {kind: place for place, kind in enumerate(REGISTRY)}  # the most telling first
    ops = range(len(graph.ops))
    for index in sorted(ops, key=lambda i: order.get(graph.ops[i].kind, len(order))):
        rule, factors = subdims.rules[index], subdims.factors[index]
        names = rule.rule.operator.words
        for factor, identity in enumerate(factors) if names else ():
            word = names.get(rule.base(factor))
            if word and _is_leading(rule, factor):
                words.setdefault(identity, word)
    for i, tensor in enumerate(graph.tensors):
        if tensor.role == "input" and not tensor.type.is_floating and len(tensor.type.shape) > 1:
            at = subdims.dims[i].index(1)
            words.setdefault(subdims.classes[i][at], "seq")
    return words


def _is_leading(rule: SubdimRule, factor: int) -> bool:
    name = rule.factors[factor]
    return "." not in name or name.endswith(".0") or factor in rule.joint


def word(rule: SubdimRule, factor: int, identity: int, words: Mapping[int, str]) -> str:
    """The word for one factor of one operator."""
    base = rule.base(factor)
    found = words.get(identity) or LOCAL.get(base)
    if found:
        return found
    return f"dim{base[1:]}" if base[0] == "i" and base[1:].isdigit() else base


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
