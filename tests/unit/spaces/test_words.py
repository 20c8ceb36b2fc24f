"""Plain words follow an atom through the graph."""

from __future__ import annotations

from shardfold.graph import Graph
from shardfold.spaces import Atoms, atomise, rules_of
from shardfold.spaces.words import batch_classes, word, words_of
from virtual.sketch import Sketch


def attention() -> tuple[Graph, Atoms]:
    sketch = Sketch()
    tokens = sketch.input(4, 16, dtype="int64")
    table = sketch.parameter(100, 32)
    x = sketch.op("embedding", {"weight": table, "indices": tokens}, (4, 16, 32))
    heads = [
        sketch.transpose(sketch.view(sketch.linear(x, sketch.parameter(32, 32)), 4, 16, 4, 8), 1, 2)
        for _ in range(3)
    ]
    graph = sketch.graph(sketch.attention(*heads))
    return graph, atomise(graph, rules_of(graph))


def test_heads_are_heads_in_the_projection_too() -> None:
    graph, atoms = attention()
    words = words_of(graph, atoms)
    linear = next(
        r for op, r in zip(graph.ops, atoms.rules, strict=True) if op.kind == "aten.linear"
    )
    found = {linear.factors[f]: word(linear, f, words) for f in range(len(linear.factors))}
    assert found == {"i0": "batch", "i1": "seq", "m": "in", "n.0": "heads", "n.1": "out"}


def test_the_batch_is_the_leading_dim_of_the_inputs() -> None:
    graph, atoms = attention()
    assert batch_classes(graph, atoms) == {atoms.classes[0][0]}


def test_the_table_is_split_by_vocabulary() -> None:
    graph, atoms = attention()
    rule = atoms.rules[0]
    assert word(rule, rule.factors.index("v"), words_of(graph, atoms)) == "vocab"


def test_a_dim_that_nobody_names_is_numbered() -> None:
    sketch = Sketch()
    graph = sketch.graph(sketch.relu(sketch.parameter(4, 6)))
    atoms = atomise(graph, rules_of(graph))
    assert word(atoms.rules[0], 1, {}) == "dim1"
