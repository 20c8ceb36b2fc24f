"""Equation 1 by hand: FLOP at peak rate, bytes at one bandwidth, nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from shardfold.cluster import Cluster, Mesh
from shardfold.cluster.hardware import Device, Level
from shardfold.cluster.mesh import Axis
from shardfold.costs import Paper, pricing_named
from shardfold.costs.steps import Collective, Compute
from shardfold.errors import InputError
from shardfold.graph import Op
from shardfold.operators import rule_for
from shardfold.operators.notation import Call
from virtual.sketch import Sketch

DEVICE = Device("toy", 2**30, 1e9, (("float32", 1e12),), 0.5, 0.8, 1e-6, "by hand")
LEVELS = (
    Level("node", 4, 1e8, 1e-4, "by hand"),
    Level("gpu", 8, 1e10, 1e-5, "by hand", rated_bandwidth=2e10),
)
MODEL = Paper(
    Cluster("toys", DEVICE, LEVELS),
    Mesh((Axis("node", 4, 0), Axis("gpu0", 2, 1), Axis("gpu1", 4, 1))),
)


def collective(kind: str, axes: tuple[int, ...], phase: str = "forward") -> float:
    step = Collective(phase, kind, axes, np.zeros(1, np.intp), np.array([2e10]))  # type: ignore[arg-type]
    return float(MODEL.collective_seconds(step)[0])


def compute(phase: str) -> float:
    step = Compute(phase, "matrix", "bfloat16", np.array([1e12]), np.array([1e12]), 5)  # type: ignore[arg-type]
    return float(MODEL.compute_seconds(step)[0])


def test_arithmetic_at_peak_and_nothing_else() -> None:
    assert compute("forward") == compute("backward") == 1.0
    assert compute("update") == 0.0


def test_bytes_at_the_rated_bandwidth_of_a_devices_own_link() -> None:
    assert collective("all_reduce", (2,)) == pytest.approx(1.5)
    assert collective("all_gather", (2,)) == pytest.approx(0.75)
    assert collective("all_reduce", (0, 1, 2)) == pytest.approx(2 * 31 / 32)


def test_a_reduce_scatter_is_an_all_reduce_and_backward_an_edge_as_well() -> None:
    assert collective("reduce_scatter", (2,)) == pytest.approx(1.5)
    assert collective("reduce_scatter", (2,), "backward") == pytest.approx(1.5 + 0.75)


def rules(graph_op: Op, sketch: Sketch) -> Call:
    return Call.of(sketch.graph(graph_op.results[0]), graph_op)


def test_an_embedding_is_a_product_with_a_one_hot_matrix() -> None:
    sketch = Sketch()
    tokens, table = sketch.input(8, dtype="int64"), sketch.parameter(100, 16)
    sketch.op("embedding", {"weight": table, "indices": tokens}, (8, 16))
    call = rules(sketch.ops[0], sketch)
    rule = rule_for(call, pricing_named("paper").rules)
    assert rule.flops * rule.points == 2 * 8 * 100 * 16
    assert [e.factor for e in rule.exchanges if e.phase == "backward"] == ["d"]
    assert rule_for(call).points < rule.points


def test_an_unknown_cost_model_is_named_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"Unknown cost model 'rofline'.*roofline"):
        pricing_named("rofline")
