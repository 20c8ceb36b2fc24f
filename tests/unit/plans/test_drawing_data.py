"""A sketch tells of every operator what the whole graph and the plan tell."""

from __future__ import annotations

import math

import pytest

import shardfold as sf
from shardfold import zoo
from shardfold.capture import capture
from shardfold.plans.drawing_data import expanded, written_by
from shardfold.plans.files import dumps, loads

MODELS = (("gpt2-tiny", 7), ("llama3-8b-tiny", 6), ("alexnet-tiny", None), ("t5-large-tiny", 6))


@pytest.fixture(scope="module", params=MODELS, ids=lambda case: case[0])
def made(request):
    name, layers = request.param
    model, args, kwargs = zoo.build(name, layers=layers)
    plan = sf.plan(model, args, kwargs, cluster="2x2xa100")
    return plan, capture(model, args, kwargs)


def test_reads_are_those_of_the_whole_graph(made) -> None:
    plan, graph = made
    writer = {t: i for i, op in enumerate(graph.ops) for t in op.results}
    rows = list(expanded(plan.sketch))
    assert len(rows) == len(plan.operators) == len(graph.ops)
    for at, (row, op) in enumerate(zip(rows, graph.ops, strict=True)):
        assert written_by(row, at) == tuple(writer.get(t) for t in op.inputs)


def test_faces_have_the_graphs_shapes_and_the_plans_splits(made) -> None:
    plan, graph = made
    for row, op, entry in zip(expanded(plan.sketch), graph.ops, plan.operators, strict=True):
        face = plan.sketch.faces[row.face]
        assert [s.shape for s in face.operands] == [graph.tensors[t].type.shape for t in op.inputs]
        assert [s.shape for s in face.results] == [graph.tensors[t].type.shape for t in op.results]
        words = {name: word for name, word, _ in face.factors}
        parts: dict[str, int] = {}
        for factor, axis in zip(entry.config, plan.mesh, strict=True):
            if factor in words:
                parts[words[factor]] = parts.get(words[factor], 1) * axis.size
        assert parts == entry.split


def test_work_and_collectives_are_the_operators_seconds(made) -> None:
    plan, _ = made
    for row, entry in zip(expanded(plan.sketch), plan.operators, strict=True):
        sent = sum(c.seconds for c in entry.collectives)
        assert math.isclose(
            sum(s for _, s in row.work) + sent, entry.seconds, rel_tol=1e-9, abs_tol=1e-15
        )


def test_moves_are_among_the_operators_collectives(made) -> None:
    plan, _ = made
    for row, entry in zip(expanded(plan.sketch), plan.operators, strict=True):
        for move in row.moves:
            same = [
                c
                for c in entry.collectives
                if (c.phase, c.kind, c.axes) == (move.phase, move.kind, move.axes)
            ]
            assert sum(c.bytes * c.count for c in same) >= move.bytes * (1 - 1e-12)


def test_a_deeper_model_has_no_longer_sketch() -> None:
    sizes = []
    for layers in (8, 40):
        model, args, kwargs = zoo.build("llama3-8b-tiny", layers=layers)
        plan = sf.plan(model, args, kwargs, cluster="2x2xa100")
        assert plan.sketch is not None
        sizes.append(len(plan.sketch.rows))
    assert sizes[1] <= 1.2 * sizes[0]  # one more block, where layers are split in two ways


def test_a_saved_sketch_is_read_back(made) -> None:
    plan, _ = made
    assert loads(dumps(plan).encode()).sketch == plan.sketch
