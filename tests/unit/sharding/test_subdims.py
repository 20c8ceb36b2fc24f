"""A split of an atom before a view is the split of the atom that it becomes, on real arrays."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draws import draws
from shardfold.graph import Graph, Op
from shardfold.operators import rules_of
from shardfold.sharding import SubdimRule, Subdims, find_subdims
from virtual.movement import chunks
from virtual.sketch import Sketch


def atoms_of(graph: Graph) -> Subdims:
    return find_subdims(graph, rules_of(graph))


def splits(rule: SubdimRule) -> set[str]:
    """The factors that an operator may split."""
    return {f for f, can in zip(rule.factors, rule.splittable, strict=True) if can}


def local_shape(subdims: Subdims, tensor: int, rank: int, atom: int, length: int) -> list[int]:
    """The shape of a tensor whose given atom has only `length` points."""
    shape = [1] * rank
    for k, (dim, size) in enumerate(
        zip(subdims.dims[tensor], subdims.tensors[tensor], strict=True)
    ):
        shape[dim] *= length if k == atom else size
    return shape


def part(
    value: np.ndarray, subdims: Subdims, tensor: int, atom: int, low: int, high: int
) -> np.ndarray:
    cut = value.reshape(subdims.tensors[tensor]).take(range(low, high), axis=atom)
    return cut.reshape(local_shape(subdims, tensor, value.ndim, atom, high - low))


def moved(op: Op, value: np.ndarray, shape: list[int]) -> np.ndarray:
    """The view itself, on a whole tensor or on a part of one."""
    if op.kind == "aten.permute":
        return value.transpose(op.attributes["dims"])
    return value.reshape(shape)


def check_views(graph: Graph, subdims: Subdims) -> int:
    """Run every view whole and in parts; how many splits were carried."""
    first = graph.ops[0].inputs[0]
    shape = graph.tensors[first].type.shape
    values = {first: np.arange(math.prod(shape)).reshape(shape)}
    carried = 0
    for op, rule in zip(graph.ops, subdims.rules, strict=True):
        (source,), (result,) = op.inputs, op.results
        whole = values[source]
        values[result] = moved(op, whole, list(graph.tensors[result].type.shape))
        for factor, can in enumerate(rule.splittable):
            if not can or factor not in rule.operands[0]:
                continue
            before, after = rule.operands[0].index(factor), rule.results[0].index(factor)
            assert subdims.classes[source][before] == subdims.classes[result][after]
            for low, high in chunks(rule.sizes[factor], 2):
                mine = part(whole, subdims, source, before, low, high)
                rank = values[result].ndim
                local = local_shape(subdims, result, rank, after, high - low)
                wanted = part(values[result], subdims, result, after, low, high)
                assert np.array_equal(moved(op, mine, local), wanted)
            carried += 1
    return carried


def check_identities(graph: Graph, subdims: Subdims) -> None:
    """Atoms with one identity hold the same elements wherever they are in a chain of views."""
    first = graph.ops[0].inputs[0]
    shape = graph.tensors[first].type.shape
    value = np.arange(math.prod(shape)).reshape(shape)
    held: dict[int, tuple[int, ...]] = {}
    seen = {first: value}
    for op in graph.ops:
        result = op.results[0]
        seen[result] = moved(op, seen[op.inputs[0]], list(graph.tensors[result].type.shape))
    for tensor, array in seen.items():
        for atom, identity in enumerate(subdims.classes[tensor]):
            size = subdims.tensors[tensor][atom]
            mine = part(array, subdims, tensor, atom, 0, -(-size // 2))
            assert held.setdefault(identity, tuple(sorted(mine.flat))) == tuple(sorted(mine.flat))


@st.composite
def factorisations(draw: st.DrawFn, total: int) -> tuple[int, ...]:
    dims = []
    while total > 1 and len(dims) < 4:
        size = draw(st.sampled_from([d for d in range(1, total + 1) if total % d == 0]))
        dims.append(size)
        total //= size
    return (*dims, total)


@st.composite
def chains(draw: st.DrawFn) -> Graph:
    total = draw(st.sampled_from([12, 24, 36, 48, 60, 72]))
    sketch = Sketch()
    x = sketch.parameter(*draw(factorisations(total)))
    for _ in range(draw(st.integers(1, 5))):
        if draw(st.booleans()):
            x = sketch.view(x, *draw(factorisations(total)))
        else:
            x = sketch.permute(x, draw(st.permutations(range(len(sketch.shape(x))))))
    return sketch.graph(x)


@given(chains())
@draws(300)
def test_random_chains_of_views_carry_splits(graph: Graph) -> None:
    subdims = atoms_of(graph)
    for tensor, kind in enumerate(graph.tensors):
        dims = [
            math.prod(
                n
                for n, at in zip(subdims.tensors[tensor], subdims.dims[tensor], strict=True)
                if at == d
            )
            for d in range(len(kind.type.shape))
        ]
        assert tuple(dims) == kind.type.shape
    check_views(graph, subdims)
    check_identities(graph, subdims)


def test_batch_and_sequence_survive_a_merge() -> None:
    sketch = Sketch()
    x = sketch.parameter(8, 16, 32)
    flat = sketch.view(x, 128, 32)
    y = sketch.linear(flat, sketch.parameter(64, 32))
    z = sketch.view(y, 8, 16, 64)
    subdims = atoms_of(sketch.graph(z))
    assert subdims.tensors[flat] == (8, 16, 32)
    assert subdims.dims[flat] == (0, 0, 1)
    assert subdims.classes[x][:2] == subdims.classes[flat][:2] == subdims.classes[z][:2]
    assert splits(subdims.rules[1]) == {"i0.0", "i0.1", "m", "n"}


def test_heads_are_split_from_hidden() -> None:
    sketch = Sketch()
    weight = sketch.parameter(768, 768)
    y = sketch.linear(sketch.parameter(4, 16, 768), weight)
    heads = sketch.view(y, 4, 16, 12, 64)
    turned = sketch.transpose(heads, 1, 2)
    subdims = atoms_of(sketch.graph(turned))
    assert subdims.tensors[weight] == (12, 64, 768)
    assert subdims.classes[weight][0] == subdims.classes[turned][1]
    assert splits(subdims.rules[0]) >= {"n.0", "n.1"}


def test_packed_queries_keys_and_values_are_split_by_heads_alike() -> None:
    sketch = Sketch()
    weight = sketch.parameter(2304, 768)
    packed = sketch.linear(sketch.parameter(4, 16, 768), weight)
    parts = [sketch.view(p, 4, 16, 12, 64) for p in sketch.split(packed, 768, 2)]
    q, k, v = (sketch.transpose(p, 1, 2) for p in parts)
    y = sketch.attention(q, k, v)
    subdims = atoms_of(sketch.graph(y))
    assert subdims.tensors[weight] == (3, 12, 64, 768)
    assert len({subdims.classes[t][1] for t in (q, k, v, y)} | {subdims.classes[weight][1]}) == 1
    assert splits(subdims.rules[1]) == {"i0", "i1", "n.0", "n.1"}  # the three parts stay whole


def test_grouped_queries_share_their_key_heads() -> None:
    sketch = Sketch()
    x = sketch.parameter(2, 16, 64)
    wq, wk = sketch.parameter(64, 64), sketch.parameter(16, 64)
    q = sketch.transpose(sketch.view(sketch.linear(x, wq), 2, 16, 8, 8), 1, 2)
    k = sketch.transpose(sketch.view(sketch.linear(x, wk), 2, 16, 2, 8), 1, 2)
    v = sketch.transpose(sketch.view(sketch.linear(x, wk), 2, 16, 2, 8), 1, 2)
    subdims = atoms_of(sketch.graph(sketch.attention(q, k, v)))
    assert subdims.tensors[wq] == (2, 4, 8, 64)
    assert subdims.tensors[wk] == (2, 8, 64)
    assert subdims.classes[wq][0] == subdims.classes[wk][0]


@pytest.mark.parametrize("direct", [True, False])
def test_a_contradiction_carries_nothing(direct: bool) -> None:
    """12 x 64 read as 8 x 96: neither 12 nor 8 divides the other's boundary."""
    sketch = Sketch()
    x = sketch.parameter(5, 12, 64)
    middle = x if direct else sketch.view(x, 5, 768)
    y = sketch.view(middle, 5, 8, 96)
    graph = sketch.graph(y)
    subdims = atoms_of(graph)
    assert subdims.classes[x][0] == subdims.classes[y][0]
    assert not set(subdims.classes[x][1:]) & set(subdims.classes[y][1:])
    assert check_views(graph, subdims) == (1 if direct else 4)
    check_identities(graph, subdims)


def test_a_readable_piece_of_a_contradiction_is_still_carried() -> None:
    """6 x 4 read as 2 x 12: the outer 2 is whole in both."""
    sketch = Sketch()
    x = sketch.parameter(6, 4)
    y = sketch.view(x, 2, 12)
    subdims = atoms_of(sketch.graph(y))
    assert subdims.tensors[x] == (2, 3, 4)
    assert subdims.tensors[y] == (2, 3, 4)
    assert check_views(sketch.graph(y), subdims) == 3


def test_dims_of_size_one_come_and_go() -> None:
    sketch = Sketch()
    x = sketch.parameter(4, 1, 6)
    y = sketch.view(x, 1, 4, 6, 1)
    graph = sketch.graph(y)
    assert check_views(graph, atoms_of(graph)) == 2


def test_a_tensor_read_as_two_factorisations_keeps_what_both_agree_on() -> None:
    """One reader sees 24 as 4 x 6, another as 8 x 3: atoms 4, 2, 3."""
    sketch = Sketch()
    x = sketch.parameter(24)
    a, b = sketch.view(x, 4, 6), sketch.view(x, 8, 3)
    loss = sketch.add(sketch.sum(a), sketch.sum(b))
    subdims = atoms_of(sketch.graph(loss))
    assert subdims.tensors[x] == (4, 2, 3)
    assert subdims.tensors[a] == (4, 2, 3)
    assert subdims.dims[a] == (0, 1, 1)
