"""The work of a step counted by hand: three products a layer, two operations a multiply-add."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import nn

from shardfold.capture import capture
from shardfold.cluster import Mesh, parse
from shardfold.cluster.mesh import Axis
from shardfold.costs.activations import Saved, saved_bytes
from shardfold.costs.operator_steps import (
    Tensors,
    Work,
    ideal_seconds,
    model_flops,
    operator_steps,
)
from shardfold.costs.steps import Collective, Compute
from shardfold.graph import Graph, Op, Operand, Tensor, TensorType
from shardfold.operators import Kernel, Operator, rules_of
from shardfold.operators.experts import imbalanced
from shardfold.sharding import Space, find_subdims, space_of


def test_a_first_layer_has_two_products_and_others_three() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    graph = capture(model, (torch.randn(32, 8),), loss=lambda y: y.square().mean())
    subdims = find_subdims(graph, rules_of(graph))
    first, second = 2 * 32 * 8 * 16, 2 * 32 * 16 * 4
    # A bias has a gradient too, which is counted as a product by the rule's own measure.
    found = model_flops(graph, subdims)
    assert found >= 2 * first + 3 * second
    assert found <= 3 * first + 4 * second
    device = parse("a100").device
    assert ideal_seconds(graph, subdims, device) == pytest.approx(found / device.peak("float32"))


ROWS, EACH, EXPERTS, HIDDEN, INNER, ITEM = 64, 2, 8, 16, 32, 2
MESH = Mesh((Axis("data", 2, 0), Axis("expert", 4, 1)))


def block_of_experts() -> Graph:
    """A block alone: rows, their experts and weights, and the two matrices of each expert."""
    shapes = {
        "x": (ROWS, HIDDEN),
        "expert": (ROWS, EACH),
        "share": (ROWS, EACH),
        "up": (EXPERTS, 2 * INNER, HIDDEN),
        "down": (EXPERTS, HIDDEN, INNER),
    }
    tensors = [
        Tensor((name,), TensorType(shape, "int64" if name == "expert" else "bfloat16"), role, grad)
        for (name, shape), grad in zip(shapes.items(), (True, False, True, True, True), strict=True)
        for role in ["input" if name in ("x", "expert", "share") else "parameter"]
    ]
    tensors.append(Tensor(("y",), TensorType((ROWS, HIDDEN), "bfloat16"), "activation", True))
    operands = tuple(Operand(name, k) for k, name in enumerate(shapes))
    attributes = {"between": "halves silu+mul moves 5 keeps 3: def forward(self, rows): ..."}
    op = Op("y", "shardfold.routed_experts", operands, (len(shapes),), attributes)
    return Graph(tuple(tensors), (op,), len(shapes))


def dispatched(
    own: Mapping[str, Operator], config: tuple[str, str] = ("i0", "d")
) -> tuple[list[Collective], float, float]:
    """The exchanges, the work forward, and the bytes that are kept, under one configuration."""
    graph = block_of_experts()
    subdims = find_subdims(graph, rules_of(graph, own))
    space = space_of(subdims.rules[0], MESH)
    row = [subdims.rules[0].factors.index(name) for name in config]
    chosen = Space(space.rule, space.configs[(space.configs == row).all(axis=1)])
    tensors = Tensors.of(graph, subdims, 0)
    steps = operator_steps(chosen, tensors, MESH).steps
    work = next(s for s in steps if isinstance(s, Compute) and s.phase == "forward")
    kept = saved_bytes(chosen, tensors, Saved(graph, subdims).by_operator(0), MESH)
    sent = [step for step in steps if isinstance(step, Collective)]
    return sent, float(work.flops[0]), float(kept[0])


def test_dispatch_sends_every_routed_row_once_each_way() -> None:
    sent, flops, kept = dispatched({})
    routed = ROWS * EACH / 8  # of each device, before and after
    row = routed * HIDDEN * ITEM
    assert [(s.kind, s.axes, s.phase, float(s.bytes[0])) for s in sent] == [
        ("all_to_all", (1,), "forward", 8.0 * EXPERTS),
        ("all_to_all", (1,), "forward", row),
        ("all_to_all", (1,), "forward", row),
        ("all_to_all", (1,), "backward", row),
        ("all_to_all", (1,), "backward", row),
    ]
    assert flops == 2 * routed * 3 * INNER * HIDDEN
    inner = routed * (4 * INNER + HIDDEN) * ITEM  # what stands between, and the rows that came
    results = routed * HIDDEN * ITEM
    assert kept == inner + results


def test_an_imbalance_is_of_the_fullest_device_where_experts_are_split() -> None:
    for config in (("i0", "d"), ("i0", "e")):
        even, uneven = dispatched({}, config), dispatched(imbalanced(1.5), config)
        assert uneven[1] == 1.5 * even[1]
        assert uneven[2] > even[2]
        rows = [
            (after.bytes[0] / before.bytes[0])
            for after, before in zip(uneven[0], even[0], strict=True)
        ]
        assert rows == ([1.0, 1.5, 1.5, 1.5, 1.5] if "d" in config else [])
    assert dispatched(imbalanced(1.5), ("i0", "f"))[1] == dispatched({}, ("i0", "f"))[1]


class Layers(nn.Module):
    """Two numbered layers, one of them with a side that is no multiple of 16, and a head."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, hidden), nn.Linear(hidden, 64)])
        self.head = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[1](self.layers[0](x))).square().mean()


def products_of(hidden: int, phase: str) -> list[list[Kernel]]:
    """The kernels of each linear layer of 128 rows on a device of its own."""
    graph = capture(Layers(hidden), (torch.randn(128, 64),), dtype="fp8-mixed")
    subdims = find_subdims(graph, rules_of(graph))
    found = []
    for index, op in enumerate(graph.ops):
        if op.kind == "aten.linear":
            space = space_of(subdims.rules[index], Mesh(()))
            tensors = Tensors.of(graph, subdims, index)
            found.append(Work(space, tensors, Mesh(())).kernels(phase))
    return found


def test_linear_layers_but_the_head_multiply_in_float8() -> None:
    """Against torchao's rowwise recipe: each operand of each product is cast anew, in 5 bytes."""
    for phase, first, second in (
        ("forward", [(128, 128, 64)], [(128, 64, 128)]),
        ("backward", [(128, 64, 128)], [(128, 128, 64), (64, 128, 128)]),
    ):
        *layers, head = products_of(128, phase)
        assert {kernel.dtype for kernel in head} == {"bfloat16"}
        for kernels, products in zip(layers, (first, second), strict=True):
            multiplied = [k for k in kernels if k.dtype == "float8"]
            assert [tuple(float(s[0]) for s in k.sizes) for k in multiplied] == products
            cast = [k for k in kernels if k.family == "vector"]
            moved = sum(float(k.sizes[0][0]) * float(k.times) for k in cast)
            assert moved == sum(5 * (m * k + n * k) for m, n, k in products)


def test_a_side_that_float8_cannot_take_stays_in_bf16() -> None:
    for phase in ("forward", "backward"):
        for kernels in products_of(120, phase)[:2]:
            there = [k for k in kernels if all(float(np.max(s)) > 0 for s in k.sizes)]
            assert {k.dtype for k in there} == {"bfloat16"}
            assert all(k.family != "vector" for k in there)
