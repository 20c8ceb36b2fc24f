"""A run in two parts is the same model: same fingerprint, same plan.

The first blocks recompute more than the others: a border anywhere in the model.
"""

from __future__ import annotations

import pytest

from shardfold import zoo
from shardfold.capture import capture_short
from shardfold.costs.activations import Blocks, Regions, in_model
from shardfold.graph import Graph
from shardfold.graph.repeats import are_alike, operator_order
from shardfold.operators import rules_of
from shardfold.planner.partial_recompute import (
    Freed,
    divide_at,
    divided,
    kind_of,
    level_regions,
)
from shardfold.planner.recompute_levels import Level
from shardfold.sharding import Subdims, find_subdims


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


LAYERS = 9


def atoms_of(graph: Graph) -> Subdims:
    return find_subdims(graph, rules_of(graph))


@pytest.mark.parametrize("name", ["llama3-8b-tiny", "t5-large-tiny"])
def test_the_first_blocks_of_a_kind_may_recompute_more(name: str) -> None:
    """A border before any block: up to there it is as if all did, and after it as if none."""
    graph = capture_short(*zoo.build(name, layers=LAYERS))
    assert graph.repeats
    blocks = Blocks(graph, atoms_of(graph))
    kinds = {kind_of(graph, block): block for block in blocks.ranges}
    less = Level(frozenset({1}))
    few = dict.fromkeys(kinds, less)
    for kind, one in kinds.items():
        more = Level(frozenset(range(len(one))))
        starts = [b.start for b in blocks.ranges if kind_of(graph, b) == kind]
        count = sum(op in starts for op, _, _ in operator_order(graph))
        every = again_in(level_regions(Freed(few | {kind: more}), blocks, 0), graph)
        none = again_in(level_regions(Freed(few), blocks, 0), graph)
        for number in {1, 2, count // 2, count - 1} & set(range(1, count)):
            parted, border = divide_at(graph, blocks, kind, number)
            freed = Freed(few, kind, more, number)
            found = level_regions(freed, Blocks(parted, atoms_of(parted)), border)
            wanted = {op for op in every if op < border} | {op for op in none if op >= border}
            assert again_in(found, parted) == wanted


def again_in(regions: Regions, graph: Graph) -> set[int]:
    return {op for first, end in in_model(regions, graph) for op in range(first, end)}
