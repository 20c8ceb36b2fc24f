"""A graph checks itself once, and its digest tells computations apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardfold.graph import Graph, Origin, Tensor, TensorType
from virtual.sketch import Sketch


def small() -> Graph:
    sketch = Sketch()
    x = sketch.input(4, 8)
    weight = sketch.parameter(8, 8)
    return sketch.graph(sketch.sum(sketch.linear(sketch.linear(x, weight), weight)))


def test_readers_are_operators_and_positions() -> None:
    assert small().readers() == {0: [(0, 0)], 1: [(0, 1), (1, 1)], 2: [(1, 0)], 3: [(2, 0)]}


def test_parameters() -> None:
    assert small().parameters() == [1]


def test_an_operator_that_reads_too_early_is_refused() -> None:
    graph = small()
    with pytest.raises(ValueError, match=r"linear_1 reads \['activation2'\] before"):
        replace(graph, ops=graph.ops[::-1][1:] + graph.ops[2:])


def test_a_loss_that_nobody_computes_is_refused() -> None:
    graph = small()
    with pytest.raises(ValueError, match="activation4 is computed by no operator"):
        replace(graph, ops=graph.ops[:2])


def test_the_digest_is_of_the_computation_not_of_its_names() -> None:
    graph = small()
    renamed = replace(
        graph,
        ops=tuple(replace(op, name=f"x{op.name}", origin=Origin("a", "b:1")) for op in graph.ops),
    )
    assert renamed.digest() == graph.digest()


@pytest.mark.parametrize(
    "change",
    [
        lambda g: replace(g, ops=(replace(g.ops[0], kind="aten.mm"), *g.ops[1:])),
        lambda g: replace(g, ops=(replace(g.ops[0], attributes={"a": 1}), *g.ops[1:])),
        lambda g: replace(
            g, tensors=(replace(g.tensors[0], type=TensorType((5, 8), "float32")), *g.tensors[1:])
        ),
        lambda g: replace(
            g, tensors=(g.tensors[0], replace(g.tensors[1], names=("other",)), *g.tensors[2:])
        ),
        lambda g: replace(
            g, tensors=(g.tensors[0], replace(g.tensors[1], requires_grad=False), *g.tensors[2:])
        ),
    ],
)
def test_the_digest_sees_every_change_of_the_computation(change) -> None:  # type: ignore[no-untyped-def]
    assert change(small()).digest() != small().digest()


def test_the_digest_is_the_same_in_every_process() -> None:
    assert small().digest() == small().digest()
    assert small().digest().startswith("sha256:")


def test_a_tensor_type_knows_its_bytes() -> None:
    assert TensorType((3, 5), "bfloat16").bytes == 30
    assert TensorType((), "float64").bytes == 8
    assert str(TensorType((3, 5), "int64")) == "int64[3, 5]"
    assert not TensorType((3,), "int64").is_floating


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="Unknown dtype 'float7'"):
        TensorType((1,), "float7")


def test_origins_print_what_is_known() -> None:
    assert str(Origin()) == "(model)"
    assert str(Origin("a.b", "m.py:3")) == "a.b (m.py:3)"
    assert Tensor(("a", "b"), TensorType((), "float32"), "parameter").name == "a"
