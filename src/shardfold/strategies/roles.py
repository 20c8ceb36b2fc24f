"""What a baseline has to know of a model: which sub-dims are heads, vocabulary, experts.

Roles come from the identities of sub-dims in the graph, never from names of modules. Heads are
what attention calls heads. The hidden features are what a product makes out of heads. The inner
features of a feed-forward block are what one product makes of hidden features and another turns
back into them; the vocabulary is the largest look-up table's rows and the classes of the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardfold.graph import Graph
from shardfold.sharding import Subdims
from shardfold.sharding.names import batch_classes, words_of

Classes = frozenset[int]  # identities of sub-dims


@dataclass(frozen=True, slots=True)
class Product:
    """A product with a weight: the operator, and the identities of its in and out features."""

    op: int
    reduced: Classes
    out: Classes


@dataclass(frozen=True, slots=True)
class Roles:
    """The sub-dims that baselines split."""

    batch: Classes
    seq: Classes
    heads: Classes
    inner: Classes
    vocabulary: Classes
    experts: Classes
    products: tuple[Product, ...]
    attention: frozenset[int]  # the operators that attend, and those that send rows to experts
    routed: frozenset[int]
    has_convolutions: bool

    @property
    def tensor_parallel(self) -> Classes:
        """What Megatron-LM splits over the devices of a node."""
        return self.heads | self.inner | self.vocabulary

    @classmethod
    def of(cls, graph: Graph, subdims: Subdims) -> Roles:
        """Read the roles off a graph."""
        words = words_of(graph, subdims)
        products = tuple(_products(graph, subdims))
        heads = _named(words, "heads") | _named(words, "queries")
        return cls(
            batch=batch_classes(graph, subdims),
            seq=_named(words, "seq"),
            heads=heads,
            inner=_inner(products, heads),
            vocabulary=_vocabulary(graph, subdims),
            experts=_named(words, "experts"),
            products=products,
            attention=_telling(subdims, "heads"),
            routed=_telling(subdims, "experts"),
            has_convolutions=any(rule.rule.operator.is_convolution for rule in subdims.rules),
        )


def _telling(subdims: Subdims, word: str) -> frozenset[int]:
    """The operators that have a word for one of their factors."""
    return frozenset(
        index
        for index, rule in enumerate(subdims.rules)
        if word in rule.rule.operator.words.values()
    )


def _named(words: dict[int, str], name: str) -> Classes:
    return frozenset(identity for identity, word in words.items() if word == name)


def _products(graph: Graph, subdims: Subdims) -> Iterator[Product]:
    for index, op in enumerate(graph.ops):
        weighted = any(graph.tensors[t].role == "parameter" for t in op.inputs)
        features = subdims.rules[index].rule.operator.features
        if features is not None and weighted:
            reduced, out = (_features(subdims, index, factor) for factor in features)
            yield Product(index, reduced, out)


def _features(subdims: Subdims, index: int, base: str) -> Classes:
    """The identities of the sub-dims of one factor of an operator that can be split."""
    rule = subdims.rules[index]
    return frozenset(
        identity
        for factor, identity in enumerate(subdims.factors[index])
        if rule.base(factor) == base and rule.splittable[factor]
    )


def _inner(products: tuple[Product, ...], heads: Classes) -> Classes:
    """Features that one product makes of hidden ones, and another turns back into hidden ones."""
    hidden = frozenset[int]().union(*(p.out for p in products if p.reduced & heads)) - heads
    # Products from and to heads also share the size of a head, which is no inner feature.
    others = [p for p in products if not (p.out | p.reduced) & heads]
    made = frozenset[int]().union(*(p.out for p in others if p.reduced & hidden))
    back = frozenset[int]().union(*(p.reduced for p in others if p.out & hidden))
    return (made & back) - hidden


def _vocabulary(graph: Graph, subdims: Subdims) -> Classes:
    """Rows of the largest look-up table, and the classes of the loss."""
    found: set[int] = set()
    tables: list[tuple[int, Classes]] = []
    for index, (op, rule) in enumerate(zip(graph.ops, subdims.rules, strict=True)):
        for factor, word in rule.rule.operator.words.items():
            if word == "vocab":
                rows = graph.tensors[op.inputs[0]].type.shape[0]
                tables.append((rows, _features(subdims, index, factor)))
            elif word == "classes":
                found |= _features(subdims, index, factor)
    largest = max((rows for rows, _ in tables), default=0)
    return frozenset(found.union(*(rows for size, rows in tables if size == largest)))
