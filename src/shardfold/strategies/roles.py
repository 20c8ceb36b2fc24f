"""What a strategy by hand has to know of a model: which atoms are heads, vocabulary, experts.

Roles are read off the graph by the identities of atoms, never off names of modules. Heads are
what attention calls heads. The hidden features are what a product makes out of heads. The inner
features of a feed-forward block are what one product makes of hidden features and another turns
back into them; the vocabulary is the largest look-up table's rows and the classes of the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardfold.graph import Graph
from shardfold.sharding import Subdims
from shardfold.sharding.factor_names import batch_classes, words_of

ATTENTION = "aten.scaled_dot_product_attention"
EXPERTS = "shardfold.expert_linear"
PRODUCTS = ("aten.linear", "aten.addmm", "aten.mm", "aten.matmul", EXPERTS)

Classes = frozenset[int]  # identities of atoms


@dataclass(frozen=True, slots=True)
class Product:
    """A product with a weight: the operator, and the identities of its in and out features."""

    op: int
    reduced: Classes
    out: Classes


@dataclass(frozen=True, slots=True)
class Roles:
    """The atoms that strategies by hand speak of."""

    batch: Classes
    seq: Classes
    heads: Classes
    inner: Classes
    vocabulary: Classes
    experts: Classes
    products: tuple[Product, ...]
    kinds: frozenset[str]

    @property
    def tensor_parallel(self) -> Classes:
        """What Megatron-LM splits over the devices of a node."""
        return self.heads | self.inner | self.vocabulary

    @property
    def has_convolutions(self) -> bool:
        """Whether the model convolves."""
        return any(kind.startswith("aten.conv") for kind in self.kinds)

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
            kinds=frozenset(op.kind for op in graph.ops),
        )


def _named(words: dict[int, str], name: str) -> Classes:
    return frozenset(identity for identity, word in words.items() if word == name)


def _products(graph: Graph, subdims: Subdims) -> Iterator[Product]:
    for index, op in enumerate(graph.ops):
        weighted = any(graph.tensors[t].role == "parameter" for t in op.inputs)
        if op.kind in PRODUCTS and weighted:
            yield Product(index, _features(subdims, index, "m"), _features(subdims, index, "n"))


def _features(subdims: Subdims, index: int, base: str) -> Classes:
    """The identities of the atoms of one factor of an operator that can be split."""
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
    largest = 0
    for index, op in enumerate(graph.ops):
        if op.kind == "aten.embedding":
            largest = max(largest, graph.tensors[op.inputs[0]].type.shape[0])
        elif op.kind == "aten.cross_entropy_loss":
            found |= _features(subdims, index, "c")
    for index, op in enumerate(graph.ops):
        if op.kind == "aten.embedding" and graph.tensors[op.inputs[0]].type.shape[0] == largest:
            found |= _features(subdims, index, "v")
    return frozenset(found)
