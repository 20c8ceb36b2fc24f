"""How a baseline splits a model: the roles of dims, and which of them it prefers.

Roles say which sub-dims are heads, vocabulary, experts. They come from the identities of sub-dims
in the graph, never from names of modules. Heads are what attention calls heads. The hidden features
are what a product makes out of heads. The inner features of a feed-forward block are what one
product makes of hidden features and another turns back into them; the vocabulary is the largest
look-up table's rows and the classes of the loss.

A way to split is, over some axes, the first of some roles that an operator has.
`Way((1, 2), (heads, seq))` says: over axes 1 and 2 an operator that has heads splits them, one
that has none splits its sequence, and one that has neither is not split. Where sizes do not
allow as many parts, an operator is split over as many devices as they allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardfold.costs import Tables, Vertex
from shardfold.graph import Graph
from shardfold.search.subproblem import restrict
from shardfold.sharding import Space, Subdims
from shardfold.sharding.configs import NONE
from shardfold.sharding.layouts import Layouts
from shardfold.sharding.names import Rows, batch_classes, words_of

Classes = frozenset[int]  # identities of sub-dims
SOFTMAXES = ("aten.softmax", "aten._safe_softmax")
CONTEXTS = ("ulysses", "gather", "ring")  # heads by all-to-all, keys gathered, keys going round


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
    dispatch: Classes  # of rows and experts together
    ring: Classes  # of queries and keys together
    products: tuple[Product, ...]
    attention: frozenset[int]  # the operators that attend, and those that send rows to experts
    routed: frozenset[int]
    has_convolutions: bool

    @property
    def tensor_parallel(self) -> Classes:
        """What Megatron-LM splits over the devices of a node."""
        return self.heads | self.inner | self.vocabulary

    def attended(self, way: str) -> Classes:
        """What attention splits where the sequence is split, in one of the `CONTEXTS`."""
        return {"ulysses": self.heads, "gather": self.seq, "ring": self.ring}[way]

    @classmethod
    def of(cls, graph: Graph, subdims: Subdims) -> Roles:
        """Read the roles off a graph."""
        words = words_of(graph, subdims)
        products, batch = tuple(_products(graph, subdims)), batch_classes(graph, subdims)
        heads, positions = _named(words, "heads") | _named(words, "queries"), Classes()
        attention = _telling(subdims, "heads")
        if not attention:
            attention, heads, positions = _written_out(graph, subdims)
            heads -= batch
        return cls(
            batch=batch,
            seq=_named(words, "seq") | (positions - batch - heads),
            heads=heads,
            inner=_inner(products, heads) | _named(words, "inner"),
            vocabulary=_vocabulary(graph, subdims),
            experts=_named(words, "experts"),
            dispatch=_named(words, "dispatch"),
            ring=_named(words, "ring"),
            products=products,
            attention=attention,
            routed=_telling(subdims, "experts"),
            has_convolutions=any(rule.rule.operator.is_convolution for rule in subdims.rules),
        )


def _written_out(graph: Graph, subdims: Subdims) -> tuple[frozenset[int], Classes, Classes]:
    """Attention that is written as two products around a softmax, with all that is between them.

    Also its heads and its positions: what is a batch to the products, and the queries' rows.
    """
    readers, writers = graph.readers(), graph.writers()
    is_product = [rule.rule.engine == "matrix" for rule in subdims.rules]

    def before(index: int) -> Iterator[int]:
        return (writers[t][0] for t in graph.ops[index].inputs if t in writers)

    def after(index: int) -> Iterator[int]:
        return (i for t in graph.ops[index].results for i, _ in readers.get(t, ()))

    def up_to_products(starts: Iterable[int], beside: Callable[[int], Iterator[int]]) -> set[int]:
        """Some operators, and those on every way from them to the next product, with it."""
        asked = list(starts)
        seen = set(asked)
        while asked:
            fresh = set(beside(asked.pop())) - seen
            seen |= fresh
            asked += [each for each in fresh if not is_product[each]]
        return seen

    def of_activations(found: set[int]) -> set[int]:
        roles = {i: [graph.tensors[t].role for t in graph.ops[i].inputs] for i in found}
        return {i for i in found if is_product[i] and roles[i] == ["activation"] * 2}

    attention, heads, positions = set[int](), set[int](), set[int]()
    for index in [i for i, op in enumerate(graph.ops) if op.kind in SOFTMAXES]:
        made_of, made_by = up_to_products([index], before), up_to_products([index], after)
        scores, values = of_activations(made_of), of_activations(made_by)
        if not (scores and values):
            continue
        attention |= made_of & up_to_products(scores, after)
        attention |= made_by & up_to_products(values, before)
        for product in scores:
            rule = subdims.rules[product].rule
            left, right, kept = (
                {f for dim in dims for f in dim} for dims in (*rule.operands[:2], rule.results[0])
            )
            heads.update(*(_features(subdims, product, f) for f in left & right & kept))
            positions.update(*(_features(subdims, product, f) for f in (left & kept) - right))
    return frozenset(attention), frozenset(heads), frozenset(positions)


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


Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Way:
    """Mesh axes, and the roles that they may split, the preferred first."""

    axes: tuple[int, ...]
    roles: tuple[Classes, ...]


Ways = tuple[Way, ...]


def choose_ways(
    tables: Tables, subdims: Subdims, ways_of: Callable[[int], Ways]
) -> tuple[int, ...]:
    """The cheapest choice in which operator i is split by `ways_of(i)`.

    Tensors and parameters lie whole, or split by what some operator splits over the same axis;
    nothing is gathered twice.
    """
    known: dict[object, Rows] = {}
    allowed = _per_axis(tables, ways_of)
    kept: dict[int, Rows] = {}
    for v, vertex in enumerate(tables.vertices):
        if vertex.space is not None:
            factors = _factors(vertex, subdims, ways_of(vertex.index))
            key: object = (id(vertex.space.configs), factors)
        else:
            factors = tuple(_split_atoms(subdims.classes[vertex.index], each) for each in allowed)
            key = (id(vertex.layouts), id(vertex.storage), factors)
        if key not in known:
            mask = _mask(vertex, factors, tables.mesh.shape)
            known[key] = np.flatnonzero(mask).astype(np.int64)
        kept[v] = known[key]
    return tuple(restrict(tables.problem, kept).solve().choice)


def parts_over(space: Space, row: int, axes: Sequence[int]) -> bool:
    """Whether a configuration splits something over every one of `axes`."""
    return bool((space.configs[row, list(axes)] >= 0).all())


def _per_axis(tables: Tables, ways_of: Callable[[int], Ways]) -> list[Classes]:
    """For each axis, every identity that some operator may split over it."""
    found: list[set[int]] = [set() for _ in tables.mesh.axes]
    for ways in {ways_of(v.index) for v in tables.vertices if v.space is not None}:
        for way in ways:
            for axis in way.axes:
                found[axis].update(*way.roles)
    return [frozenset(each) for each in found]


def _factors(vertex: Vertex, subdims: Subdims, ways: Ways) -> tuple[tuple[int, ...], ...]:
    """For each axis, the factors of an operator that may be split over it."""
    assert vertex.space is not None
    rule, identities = vertex.space.rule, subdims.factors[vertex.index]
    per_axis: list[tuple[int, ...]] = [()] * vertex.space.configs.shape[1]
    for way in ways:
        for role in way.roles:
            factors = tuple(f for f, c in enumerate(identities) if c in role and rule.splittable[f])
            if factors:
                for axis in way.axes:
                    per_axis[axis] = factors
                break
    return tuple(per_axis)


def _split_atoms(classes: Sequence[int], allowed: Classes) -> tuple[int, ...]:
    return tuple(k for k, identity in enumerate(classes) if identity in allowed)


def _mask(vertex: Vertex, allowed: Sequence[tuple[int, ...]], shape: Sequence[int]) -> Mask:
    if vertex.space is not None:
        rows = vertex.space.configs
        return _fullest(rows, _only(rows, allowed, NONE), shape)
    assert vertex.layouts is not None
    mask = _only(vertex.layouts, allowed, None)
    return mask if vertex.storage is None else mask & ~vertex.storage.regathers


def _only(rows: Layouts, allowed: Sequence[tuple[int, ...]], none: int | None) -> Mask:
    """Rows that on each axis have an allowed number, or none (of any kind, unless one is named)."""
    mask = np.ones(len(rows), dtype=bool)
    for axis, numbers in enumerate(allowed):
        unsplit = rows[:, axis] < 0 if none is None else rows[:, axis] == none
        for number in numbers:
            unsplit = unsplit | (rows[:, axis] == number)
        mask &= unsplit
    return mask


def _fullest(rows: Layouts, mask: Mask, shape: Sequence[int]) -> Mask:
    """Of the rows that the mask keeps, those that are split over the most devices."""
    sizes = np.where(rows >= 0, np.asarray(shape, dtype=np.int64), 1)
    devices = np.where(mask, np.prod(sizes, axis=1), 0)
    most: Mask = np.equal(devices, devices.max())
    return mask & most
