"""The roofline model against figures worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shardfold.cluster import Cluster, Mesh
from shardfold.cluster.hardware import Device, Level
from shardfold.cluster.mesh import Axis
from shardfold.costs import Roofline
from shardfold.costs.model import ROUNDS, VOLUME
from shardfold.costs.steps import Collective, Compute
from shardfold.errors import ClusterError
from virtual.choosing import Desk
from virtual.sketch import Sketch

DEVICE = Device(
    "toy", 2**30, 1e9, (("float32", 1e12), ("bfloat16", 4e12)), 0.5, 0.8, 1e-6, "by hand"
)
CLUSTER = Cluster(
    "toys", DEVICE, (Level("node", 4, 1e8, 1e-4, "by hand"), Level("gpu", 8, 1e10, 1e-5, "by hand"))
)
MESH = Mesh((Axis("node", 4, 0), Axis("gpu0", 2, 1), Axis("gpu1", 4, 1)))
MODEL = Roofline(CLUSTER, MESH)


def compute(engine: str, dtype: str, flops: float, size: float, kernels: int = 1) -> float:
    step = Compute("forward", engine, dtype, np.array([flops]), np.array([size]), kernels)
    return float(MODEL.compute_seconds(step)[0])


def collective(kind: str, axes: tuple[int, ...], size: float) -> float:
    step = Collective("forward", kind, axes, np.zeros(1, np.intp), np.array([size]))  # type: ignore[arg-type]
    return float(MODEL.collective_seconds(step)[0])


def test_a_product_bound_by_arithmetic() -> None:
    assert compute("matrix", "float32", 1e12, 1e3) == pytest.approx(2.0 + 1e-6)
    assert compute("matrix", "bfloat16", 1e12, 1e3) == pytest.approx(0.5 + 1e-6)


def test_an_elementwise_kernel_bound_by_memory() -> None:
    assert compute("vector", "bfloat16", 1e3, 8e8) == pytest.approx(1.0 + 1e-6)


def test_vector_work_runs_at_the_float32_rate() -> None:
    assert compute("vector", "bfloat16", 1e12, 1.0) == pytest.approx(1.0 + 1e-6)


def test_every_kernel_is_launched() -> None:
    assert compute("vector", "float32", 0.0, 0.0, kernels=3) == pytest.approx(3e-6)


def test_a_dtype_without_a_rate_is_refused() -> None:
    with pytest.raises(ClusterError, match="no peak rate for 'float16'"):
        compute("matrix", "float16", 1.0, 1.0)


def test_an_all_reduce_within_a_node() -> None:
    """Two axes on one level are one ring of 8: 2 * 7/8 of the bytes, 2 * 7 hops."""
    assert collective("all_reduce", (1, 2), 8e6) == pytest.approx(1.75 * 8e6 / 1e10 + 14 * 1e-5)


def test_a_small_sum_goes_by_a_tree() -> None:
    """Up and down three levels of it, at 0.92 of the bandwidth."""
    by_tree = 2 * 8e3 / 0.92e10 + 6 * 1e-5
    assert collective("all_reduce", (1, 2), 8e3) == pytest.approx(by_tree)


@pytest.mark.parametrize(("kind", "rounds"), [("all_gather", 1), ("all_reduce", 2)])
def test_a_ring_over_two_levels(kind: str, rounds: int) -> None:
    """16 devices: 12 hops within nodes, 3 between them, whose 4 devices share out what is sent."""
    once = 15 / 16 * 8e6 / 4e8 + 12 * 1e-5 + 3 * 1e-4
    assert collective(kind, (0, 2), 8e6) == pytest.approx(rounds * once)


def test_a_tree_over_two_levels_has_as_many_hops_as_doublings() -> None:
    by_tree = 2 * 8e3 / (0.92 * 4e8) + 2 * (2 * 1e-5 + 2 * 1e-4)
    assert collective("all_reduce", (0, 2), 8e3) == pytest.approx(by_tree)


def test_what_goes_to_other_nodes_crosses_their_links_whole() -> None:
    between, within = 0.75 * 8e6 / 1e8 + 3 * 1e-4, 0.75 * 2e6 / 1e10 + 3 * 1e-5
    assert collective("all_to_all", (0, 2), 8e6) == pytest.approx(between + within)


@pytest.mark.parametrize(
    ("kind", "share", "rounds"),
    [("all_gather", 0.75, 3), ("reduce_scatter", 0.75, 3), ("all_to_all", 0.75, 3), ("halo", 1, 1)],
)
def test_other_collectives_over_four(kind: str, share: float, rounds: int) -> None:
    assert collective(kind, (2,), 4e6) == pytest.approx(share * 4e6 / 1e10 + rounds * 1e-5)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    for n in (2, 3, 8, 64):
        assert VOLUME["all_reduce"](n) == VOLUME["reduce_scatter"](n) + VOLUME["all_gather"](n)
        assert ROUNDS["all_reduce"](n) == ROUNDS["reduce_scatter"](n) + ROUNDS["all_gather"](n)


def test_one_linear_layer_by_hand() -> None:
    """64 x 128 times 128 x 256 in float32 on one of two A100s, by batch."""
    sketch = Sketch()
    loss = sketch.sum(sketch.linear(sketch.input(64, 128), sketch.parameter(256, 128)))
    desk = Desk.of(sketch.graph(loss), "2xa100", "2")
    device = desk.model.cluster.device  # type: ignore[attr-defined]
    rate = device.peak("float32") * device.matmul_efficiency
    memory = device.memory_bandwidth * device.memory_efficiency
    flops = 2 * 32 * 128 * 256
    size = 4 * (32 * 128 + 128 * 256 + 32 * 256)
    once = max(flops / rate, size / memory) + device.launch_seconds
    rows = desk.rows(desk.tables.vertices[0])
    found = desk.tables.problem.costs[0][rows.index(("i0",))]
    assert found == pytest.approx(2 * once)  # backward: the weight's gradient alone
    assert math.isfinite(found)
