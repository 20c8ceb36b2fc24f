"""The folded model: every operator is in it once, and every reading and every byte."""

from __future__ import annotations

import math

import msgspec
import pytest

import shardfold as sf
from shardfold import zoo
from shardfold.plans.drawing_data import expanded, written_by
from shardfold.report.module_tree import Branch, Leaf, leaves, outline

MODELS = {
    "gpt2-tiny": 6,
    "llama3-8b-tiny": 6,
    "inceptionv3-tiny": None,
    "transformer-tiny": None,
    "rnnlm-tiny": None,
}


@pytest.fixture(scope="module", params=MODELS)
def plan(request) -> sf.Plan:
    model, args, kwargs = zoo.build(request.param, layers=MODELS[request.param])
    return sf.plan(model, args, kwargs, cluster="2x2x1080ti")


def branches(node: Branch | Leaf):
    if isinstance(node, Branch):
        yield node
        for child in node.children:
            yield from branches(child)


def test_every_operator_is_shown_once(plan: sf.Plan) -> None:
    found = [place for leaf in leaves(outline(plan).root) for place in leaf.places]
    assert sorted(found) == list(range(len(plan.operators)))


def test_what_is_folded_is_split_alike(plan: sf.Plan) -> None:
    for leaf in leaves(outline(plan).root):
        assert len({(plan.operators[k].kind, plan.operators[k].config) for k in leaf.places}) == 1


def test_a_leaf_stands_for_as_many_as_the_blocks_around_it(plan: sf.Plan) -> None:
    def walk(node: Branch | Leaf, copies: int) -> None:
        if isinstance(node, Leaf):
            assert len(node.places) == copies
        else:
            for child in node.children:
                walk(child, copies * (child.times if isinstance(child, Branch) else 1))

    walk(outline(plan).root, 1)


def test_links_go_forward_or_to_the_next_of_a_fold(plan: sf.Plan) -> None:
    found = outline(plan)
    for branch in branches(found.root):
        for link in found.links.get(id(branch), ()):
            if link.source == link.target:
                child = branch.children[link.source]
                assert isinstance(child, Branch)
                assert child.times > 1
            else:
                assert link.source < link.target


def test_no_reading_is_lost_and_no_byte(plan: sf.Plan) -> None:
    found = outline(plan)
    copies: dict[int, int] = {}

    def walk(node: Branch | Leaf, times: int) -> None:
        if isinstance(node, Branch):
            copies[id(node)] = times
            for child in node.children:
                walk(child, times * (child.times if isinstance(child, Branch) else 1))

    walk(found.root, 1)
    shown = math.fsum(
        copies[key] * size
        for key, links in found.links.items()
        for link in links
        for size in link.moved.values()
    )
    rows = list(expanded(plan.sketch))
    moved = math.fsum(
        move.bytes
        for at, row in enumerate(rows)
        for move in row.moves
        if move.operand >= 0 and written_by(row, at)[move.operand] is not None
    )
    read = {source for at, row in enumerate(rows) for source in written_by(row, at)}
    kept = math.fsum(
        move.bytes
        for at, row in enumerate(rows)
        for move in row.moves
        if move.operand < 0 and at in read
    )
    # What is kept for several readers is drawn on each of their edges, in each block once.
    assert shown >= moved * (1 - 1e-9)
    assert bool(shown) == bool(moved + kept)


def test_a_stack_of_layers_is_one_block() -> None:
    model, args, kwargs = zoo.build("gpt2-tiny", layers=9)
    found = outline(sf.plan(model, args, kwargs, cluster="2xa100"))
    assert max(branch.times for branch in branches(found.root)) >= 7


def test_a_plan_without_a_sketch_has_an_outline(plan: sf.Plan) -> None:
    bare = msgspec.structs.replace(plan, sketch=None)
    assert len([p for leaf in leaves(outline(bare).root) for p in leaf.places]) == len(
        plan.operators
    )
