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


def words_in(graph: Graph, atoms: Atoms, op: int) -> dict[str, str]:
    """The word for every factor of one operator."""
    rule, words = atoms.rules[op], words_of(graph, atoms)
    return {name: word(rule, f, atoms.factors[op][f], words) for f, name in enumerate(rule.factors)}


def test_heads_are_heads_in_the_projection_too() -> None:
    graph, atoms = attention()
    linear = [op.kind for op in graph.ops].index("aten.linear")
    assert words_in(graph, atoms, linear) == {
        "i0": "batch",
        "i1": "seq",
        "m": "in",
        "n.0": "heads",
        "n.1": "out",
    }


def test_the_batch_is_the_leading_dim_of_the_inputs() -> None:
    graph, atoms = attention()
    assert batch_classes(graph, atoms) == {atoms.classes[0][0]}


def test_the_table_is_split_by_vocabulary() -> None:
    graph, atoms = attention()
    assert words_in(graph, atoms, 0)["v"] == "vocab"


def test_a_dim_that_nobody_names_is_numbered() -> None:
    sketch = Sketch()
    graph = sketch.graph(sketch.relu(sketch.parameter(4, 6)))
    assert words_in(graph, atomise(graph, rules_of(graph)), 0) == {"i0": "dim0", "i1": "dim1"}
