"""Plain words follow an atom through the graph."""

from __future__ import annotations

from shardfold.graph import Graph
from shardfold.operators import rules_of
from shardfold.sharding import Subdims, find_subdims
from shardfold.sharding.names import batch_classes, word, words_of
from virtual.sketch import Sketch


def attention() -> tuple[Graph, Subdims]:
    sketch = Sketch()
    tokens = sketch.input(4, 16, dtype="int64")
    table = sketch.parameter(100, 32)
    x = sketch.op("embedding", {"weight": table, "indices": tokens}, (4, 16, 32))
    heads = [
        sketch.transpose(sketch.view(sketch.linear(x, sketch.parameter(32, 32)), 4, 16, 4, 8), 1, 2)
        for _ in range(3)
    ]
    graph = sketch.graph(sketch.attention(*heads))
    return graph, find_subdims(graph, rules_of(graph))


def words_in(graph: Graph, subdims: Subdims, op: int) -> dict[str, str]:
    """The word for every factor of one operator."""
    rule, words = subdims.rules[op], words_of(graph, subdims)
    return {
        name: word(rule, f, subdims.factors[op][f], words) for f, name in enumerate(rule.factors)
    }


def test_heads_are_heads_in_the_projection_too() -> None:
    graph, subdims = attention()
    linear = [op.kind for op in graph.ops].index("aten.linear")
    assert words_in(graph, subdims, linear) == {
        "i0": "batch",
        "i1": "seq",
        "m": "in",
        "n.0": "heads",
        "n.1": "out",
    }


def test_the_batch_is_the_leading_dim_of_the_inputs() -> None:
    graph, subdims = attention()
    assert batch_classes(graph, subdims) == {subdims.classes[0][0]}


def test_the_table_is_split_by_vocabulary() -> None:
    graph, subdims = attention()
    assert words_in(graph, subdims, 0)["v"] == "vocab"


def test_a_dim_that_nobody_names_is_numbered() -> None:
    sketch = Sketch()
    graph = sketch.graph(sketch.relu(sketch.parameter(4, 6)))
    assert words_in(graph, find_subdims(graph, rules_of(graph)), 0) == {"i0": "dim0", "i1": "dim1"}
