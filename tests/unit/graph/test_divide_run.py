"""A run in two parts is the same model: same fingerprint, same plan."""

from __future__ import annotations

import pytest

import shardfold.zoo as zoo
from shardfold.capture import capture_short
from shardfold.graph import Graph
from shardfold.graph.divide_run import divided
from shardfold.graph.repeats import are_alike


def graph_of(name: str, layers: int) -> Graph:
    module, args, kwargs = zoo.build(name, layers=layers)
    graph = capture_short(module, args, kwargs)
    assert graph.repeats
    return graph


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama3-8b-tiny", "t5-large-tiny"])
def test_the_model_stays_the_same(name: str) -> None:
    graph = graph_of(name, 14)
    for number, repeat in enumerate(graph.repeats):
        for first in range(1, repeat.count):
            found = divided(graph, number, first)
            parts = found.repeats[number : len(found.repeats) - len(graph.repeats) + number + 1]
            assert {r.count for r in parts} <= {first - 1, repeat.count - first}
            assert all(are_alike(found, each) for each in found.repeats)
            assert found.operator_count == graph.operator_count
            assert found.digest() == graph.digest()


def test_a_border_at_an_end_is_refused() -> None:
    graph = graph_of("gpt2-tiny", 14)
    for first in (0, graph.repeats[0].count):
        with pytest.raises(ValueError, match="cannot be divided"):
            divided(graph, 0, first)
