from __future__ import annotations

from dataclasses import replace

import pytest

from shardfold.cluster import Device, Level
from shardfold.cluster.catalog import find_hardware, hardware_names
from shardfold.errors import ClusterError

DEVICE = Device(
    name="toy",
    memory_bytes=16,
    memory_bandwidth=1e12,
    peak_flops=(("float32", 1e13), ("bfloat16", 4e13)),
    matmul_efficiency=0.8,
    memory_efficiency=0.9,
    launch_seconds=5e-6,
    source="made up",
)


def test_peak_is_the_rate_of_the_dtype() -> None:
    assert DEVICE.peak("float32") == 1e13
    assert DEVICE.peak("bfloat16") == 4e13


def test_a_dtype_without_a_figure_has_no_fallback() -> None:
    with pytest.raises(
        ClusterError, match=r"toy has no peak rate for 'float16'.*float32, bfloat16"
    ):
        DEVICE.peak("float16")


def test_the_order_of_the_rates_does_not_matter() -> None:
    assert replace(DEVICE, peak_flops=DEVICE.peak_flops[::-1]) == DEVICE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes": 0}, "memory_bytes must be finite and positive, got 0"),
        ({"memory_bandwidth": -1.0}, "memory_bandwidth must be finite and positive, got -1"),
        ({"memory_bandwidth": float("nan")}, "memory_bandwidth must be finite"),
        ({"peak_flops": ()}, "peak_flops is empty"),
        ({"peak_flops": (("bf16", 1.0),)}, "unknown dtype 'bf16'. Did you mean bfloat16"),
        ({"peak_flops": (("float32", float("inf")),)}, "peak_flops.float32 must be finite"),
        ({"peak_flops": (("float32", 1.0), ("float32", 2.0))}, "names a dtype twice"),
        ({"matmul_efficiency": 0.0}, "matmul_efficiency must be finite and positive, got 0"),
        ({"memory_efficiency": 1.2}, "memory_efficiency is a fraction, got 1.2 > 1"),
        ({"launch_seconds": -1e-6}, "launch_seconds must be finite and not negative"),
    ],
)
def test_a_wrong_figure_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        replace(DEVICE, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("Node", 2, 1e9, 1e-6, ""), "'Node' must be lower-case letters"),
        (("gpu0", 2, 1e9, 1e-6, ""), "'gpu0' must be lower-case letters"),
        (("node", 0, 1e9, 1e-6, ""), "Level node: size must be from 1 to 1,000,000, got 0"),
        (("node", 10**7, 1e9, 1e-6, ""), "got 10,000,000"),
        (("node", 2, 0.0, 1e-6, ""), "bandwidth must be finite and positive, got 0"),
        (("node", 2, float("inf"), 1e-6, ""), "bandwidth must be finite"),
        (("node", 2, 1e9, -1.0, ""), "latency_seconds must be finite and not negative, got -1"),
        (("node", 2, 2e9, 1e-6, "", 1e9), r"cannot exceed rated_bandwidth, got 2e\+09 and 1e\+09"),
    ],
)
def test_a_wrong_figure_of_a_level_is_named(fields: tuple[object, ...], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Level(*fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", [name for name in hardware_names() if find_hardware(name).name not in ("cpu", "trn2")]
)
def test_every_gpu_states_what_kernels_by_shape_need(name: str) -> None:
    device = find_hardware(name).device
    assert device.units > 0
    assert device.clock_hz > 1e9
    assert all(0 < share < 1 for share in device.attention_efficiency)
