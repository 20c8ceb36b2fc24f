"""The known parallelisms fall out of the algebra, collective by collective."""

from __future__ import annotations

import numpy as np
import pytest

from shardfold.costs.steps import Collective
from shardfold.graph import Graph
from shardfold.plans.entries import parameter_entries
from shardfold.sharding.layouts import REPLICATED
from virtual.choosing import Desk, collectives
from virtual.sketch import Sketch

B, M, N = 8, 16, 32
ACTIVATION = B * M * 4  # bytes of the tensor between two blocks
LOSS = ("forward", "all_reduce", (0,), 4)


def mlp(blocks: int = 1) -> Graph:
    """A first product, so that the input of the blocks has a gradient; then m -> n -> m."""
    sketch = Sketch()
    x = sketch.linear(sketch.input(B, M), sketch.parameter(M, M))
    for _ in range(blocks):
        h = sketch.relu(sketch.linear(x, sketch.parameter(N, M)))
        x = sketch.relu(sketch.linear(h, sketch.parameter(M, N)))
    return sketch.graph(sketch.sum(x))


MEGATRON = {"linear_1": "n", "relu_2": "i1", "linear_3": "m"}
MEGATRON_2 = MEGATRON | {"linear_5": "n", "relu_6": "i1", "linear_7": "m"}


def test_tensor_parallelism_sums_one_activation_each_way() -> None:
    desk = Desk.of(mlp(), "2xa100", "2")
    assert collectives(desk.choose(MEGATRON)) == [
        ("backward", "all_reduce", (0,), ACTIVATION),
        ("forward", "all_reduce", (0,), ACTIVATION),
    ]


def test_two_blocks_sum_two_activations_each_way() -> None:
    desk = Desk.of(mlp(2), "2xa100", "2")
    phases = [phase for phase, kind, _, size in collectives(desk.choose(MEGATRON_2))]
    assert phases == ["backward"] * 2 + ["forward"] * 2


def test_data_parallelism_sums_every_gradient_once() -> None:
    desk = Desk.of(mlp(), "2xa100", "2")
    by_batch = {op.name: "i0" for op in desk.graph.ops}
    sizes = sorted([M * M * 4, M * N * 4, M * N * 4])
    assert collectives(desk.choose(by_batch)) == [
        *(("backward", "all_reduce", (0,), size) for size in sizes),
        LOSS,
    ]


def test_sequence_parallelism_scatters_and_gathers() -> None:
    """What was one all-reduce is a reduce-scatter before the split operator, a gather after."""
    desk = Desk.of(mlp(2), "2xa100", "2")
    found = collectives(desk.choose(MEGATRON_2 | {"relu_4": "i0"}))
    middle = [c for c in found if c[1] != "all_reduce"]
    assert middle == [
        ("backward", "all_gather", (0,), ACTIVATION),
        ("backward", "reduce_scatter", (0,), ACTIVATION),
        ("forward", "all_gather", (0,), ACTIVATION),
        ("forward", "reduce_scatter", (0,), ACTIVATION),
    ]
    assert len(found) - len(middle) == 2


def test_data_and_tensor_parallelism_mix_by_axis() -> None:
    desk = Desk.of(mlp(), "4xa100", "2x2")
    configs = {op.name: "i0 -" for op in desk.graph.ops}
    configs |= {"linear_1": "i0 n", "relu_2": "i0 i1", "linear_3": "i0 m"}
    assert collectives(desk.choose(configs)) == sorted(
        [
            ("forward", "all_reduce", (1,), ACTIVATION // 2),
            ("backward", "all_reduce", (1,), ACTIVATION // 2),
            ("backward", "all_reduce", (0,), M * M * 4),
            ("backward", "all_reduce", (0,), M * N * 4 // 2),
            ("backward", "all_reduce", (0,), M * N * 4 // 2),
            LOSS,
        ]
    )


def test_readers_of_one_tensor_share_its_backward_sum() -> None:
    """Queries, keys and values read x: the sum of x's gradients is all-reduced once."""
    sketch = Sketch()
    x = sketch.linear(sketch.input(B, M), sketch.parameter(M, M))
    y = [sketch.relu(sketch.linear(x, sketch.parameter(M, M))) for _ in range(3)]
    z = sketch.add(sketch.add(y[0], y[1]), y[2])
    desk = Desk.of(sketch.graph(sketch.sum(z)), "2xa100", "2")
    configs = {op.name: "i1" for op in desk.graph.ops if op.kind != "aten.linear"}
    configs |= {f"linear_{k}": "n" for k in (1, 3, 5)}
    found = collectives(desk.choose(configs))
    assert [c for c in found if c[0] == "backward"] == [
        ("backward", "all_reduce", (0,), ACTIVATION)
    ]


def test_readers_of_one_tensor_share_its_gather() -> None:
    sketch = Sketch()
    x = sketch.relu(sketch.linear(sketch.input(B, M), sketch.parameter(M, M)))
    y = [sketch.linear(x, sketch.parameter(M, M)) for _ in range(3)]
    z = sketch.add(sketch.add(y[0], y[1]), y[2])
    desk = Desk.of(sketch.graph(sketch.sum(z)), "2xa100", "2")
    configs = {f"linear_{k}": "n" for k in (2, 3, 4)} | {
        "add_5": "i1",
        "add_6": "i1",
        "sum_7": "i1",
    }
    found = collectives(desk.choose(configs | {"relu_1": "i0", "linear_0": "i0"}))
    assert [c for c in found if c[0] == "forward" and c[3] > 4] == [
        ("forward", "all_gather", (0,), ACTIVATION)
    ]


def tied() -> Graph:
    sketch = Sketch()
    tokens = sketch.input(B, dtype="int64")
    table = sketch.parameter(64, M, names=("embed.weight", "head.weight"))
    x = sketch.op("embedding", {"weight": table, "indices": tokens}, (B, M))
    return sketch.graph(sketch.cross_entropy(sketch.linear(x, table), tokens))


def test_a_tied_weight_is_one_decision_that_both_readers_see() -> None:
    desk = Desk.of(tied(), "2xa100", "2")
    parameters = [v for v, x in enumerate(desk.tables.vertices) if x.what == "parameter"]
    assert len(parameters) == 1
    readers = [e.target for e in desk.tables.edges if e.source == parameters[0]]
    assert sorted(desk.graph.ops[desk.tables.vertices[r].index].kind for r in readers) == [
        "aten.embedding",
        "aten.linear",
    ]


def test_a_tied_weight_that_is_split_alike_moves_nothing() -> None:
    desk = Desk.of(tied(), "2xa100", "2")
    split = {"embedding_0": "v", "linear_1": "n", "cross_entropy_loss_2": "c"}
    decoded = desk.choose(split)
    assert parameter_entries(decoded)[0].layout == ("dim 0",)
    assert all(size < 64 * M * 4 // 2 for _, _, _, size in collectives(decoded))


def test_a_tied_weights_gradient_is_reduced_once() -> None:
    desk = Desk.of(tied(), "2xa100", "2")
    problem = desk.tables.problem
    by_batch = {"embedding_0": "i0", "linear_1": "i0", "cross_entropy_loss_2": "b"}
    plain = desk.choose(by_batch)  # stored as used: each reader's gradient is reduced for itself
    weight = next(v for v, x in enumerate(desk.tables.vertices) if x.what == "parameter")
    size = 64 * M * 4
    reduced = ("backward", "all_reduce", (0,), size)
    assert collectives(plain).count(reduced) == 2

    def total(row: int) -> float:
        choice = [*plain.choice[:weight], row, *plain.choice[weight + 1 :]]
        return problem.total(tuple(choice))

    best = min(range(len(problem.costs[weight])), key=total)
    found = desk.decoded((*plain.choice[:weight], best, *plain.choice[weight + 1 :]))
    assert parameter_entries(found)[0].layout == ("replicated, gradient partial",)
    assert collectives(found).count(reduced) == 1
    # What is priced is what the steps say.
    saved = total(plain.choice[weight]) - total(best)
    step = next(s for s in found.steps[0] if isinstance(s, Collective) and s.kind == "all_reduce")
    assert saved == pytest.approx(found.price(step))


def test_a_fully_sharded_parameter_is_gathered_twice_and_its_gradient_scattered() -> None:
    desk = Desk.of(mlp(), "2xa100", "2")
    by_batch = {op.name: "i0" for op in desk.graph.ops}
    plain = desk.choose(by_batch)
    choice = list(plain.choice)
    for v, vertex in enumerate(desk.tables.vertices):
        if vertex.storage is not None:
            choice[v] = int(np.flatnonzero(vertex.storage.regathers)[0])
    sizes = sorted([M * M * 4, M * N * 4, M * N * 4])
    # The first layer reads the batch, whose gradient nobody asks for: its weight is not needed.
    again = [size for size in sizes if size != M * M * 4]
    assert collectives(desk.decoded(tuple(choice))) == [
        *(("backward", "all_gather", (0,), size) for size in again),
        *(("backward", "reduce_scatter", (0,), size) for size in sizes),
        *(("forward", "all_gather", (0,), size) for size in sizes),
        LOSS,
    ]


def test_inputs_and_what_follows_from_them_alone_cost_nothing_to_move() -> None:
    sketch = Sketch()
    tokens = sketch.relu(sketch.input(B, M))
    desk = Desk.of(
        sketch.graph(sketch.sum(sketch.linear(tokens, sketch.parameter(N, M)))), "2xa100", "2"
    )
    constant = desk.tables.vertices[0]
    assert constant.space is not None
    assert len(constant.space.configs) == 1
    assert not any(edge.source == 0 for edge in desk.tables.edges)
    assert collectives(desk.choose({"linear_1": "n", "sum_2": "i1"})) == [LOSS]


def test_a_tensor_without_gradient_moves_only_forward() -> None:
    sketch = Sketch()
    x = sketch.linear(sketch.input(B, M), sketch.parameter(N, M))
    detached = sketch.op("detach", {"self": x}, (B, N))
    tensor = sketch.tensors[detached]
    sketch.tensors[detached] = type(tensor)(tensor.names, tensor.type, tensor.role, False)
    y = sketch.linear(detached, sketch.parameter(M, N))
    desk = Desk.of(sketch.graph(sketch.sum(y)), "2xa100", "2")
    found = collectives(
        desk.choose({"linear_0": "n", "detach_1": "v1", "linear_2": "n", "sum_3": "i1"})
    )
    assert found == [("forward", "all_gather", (0,), B * N * 4), LOSS]


def test_equal_operators_share_one_table() -> None:
    """The second and the third of four blocks: four operators each, the same tables."""
    desk = Desk.of(mlp(4), "4xa100", "2x2")
    problem = desk.tables.problem
    tables = [id(problem.costs[v]) for v in range(len(desk.graph.ops))]
    assert tables[5:9] == tables[9:13]
    assert len({id(table) for table in problem.edge_costs}) < len(problem.edge_costs) / 2


@pytest.mark.parametrize(("optimizer", "copies"), [("sgd", 2), ("momentum", 3), ("adamw", 4)])
def test_a_parameter_costs_its_gradient_and_its_state_too(optimizer: str, copies: int) -> None:
    sketch = Sketch()
    x = sketch.input(B, M)
    loss = sketch.sum(sketch.linear(x, sketch.parameter(N, M)))
    desk = Desk.of(sketch.graph(loss), "2xa100", "2", optimizer)
    whole = desk.choose({"linear_0": "i0", "sum_1": "i0"})
    split = desk.choose({"linear_0": "n", "sum_1": "i1"})
    assert desk.tables.problem.total_bytes(whole.choice) == copies * N * M * 4
    assert desk.tables.problem.total_bytes(split.choice) == copies * N * M * 4 / 2


def test_saved_activations_are_counted_once() -> None:
    """h is kept by the product that reads it and by the relu that wrote it: one tensor."""
    desk = Desk.of(mlp(), "2xa100", "2")
    by_batch = {op.name: "i0" for op in desk.graph.ops}
    parameters = 2 * (M * M + 2 * M * N) * 4
    x, h, last = ACTIVATION / 2, B * N * 4 / 2, ACTIVATION / 2
    total = desk.tables.problem.total_bytes(desk.choose(by_batch).choice)
    assert total == parameters + x + h + last


def test_the_loss_ends_complete_on_every_device() -> None:
    desk = Desk.of(mlp(), "4xa100", "2x2")
    kept = [v for v in desk.tables.vertices if v.what == "tensor" and v.index == desk.graph.loss]
    assert [v.layouts.tolist() for v in kept if v.layouts is not None] == [[[REPLICATED] * 2]]
