"""Kernels by the device's datasheet: against those measured on an H200, and by their shape."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from shardfold.capture import capture
from shardfold.cluster import Mesh, from_plain, parse
from shardfold.costs import assumed
from shardfold.costs.accuracy import spread_of
from shardfold.costs.by_kernel import ByKernel
from shardfold.costs.kernels import Datasheet
from shardfold.costs.model import Roofline, split_seconds
from shardfold.costs.operator_steps import Tensors, operator_steps
from shardfold.costs.profile import FAMILIES, load
from shardfold.costs.registry import by_kernel
from shardfold.costs.steps import Compute
from shardfold.operators import Kernel, rules_of
from shardfold.sharding import Space, find_subdims

H200 = Path(__file__).parents[3] / "benchmarks" / "profiles" / "h200.json"
LONG = 50e-6  # what decides a step
MEDIANS = {
    "matmul.nt": 0.06,
    "matmul.nn": 0.06,
    "matmul.tn": 0.06,
    "bmm": 0.12,
    "attention.causal.forward": 0.08,
    "attention.causal.backward": 0.12,
    "attention.full.forward": 0.05,
    "attention.full.backward": 0.12,
    "attention.shared.backward": 0.12,
    "vector": 0.02,
    "cast": 0.1,
    "strided": 0.12,
    "layer_norm.forward": 0.15,
    "layer_norm.backward": 0.15,
    "softmax.backward": 0.12,
    "loss.backward": 0.12,
    "sum_columns": 0.12,
    "depthwise.forward": 0.1,
    "depthwise.backward": 0.12,
    "group_norm.forward": 0.12,
    "conv.3x3.forward": 0.15,
    "conv.3x3.backward": 0.2,
    "conv.7x7/2.forward": 0.2,
    "conv.16x16/16.forward": 0.35,
    "lookup.backward": 0.12,
}


@pytest.fixture(scope="module")
def sheet():
    return Datasheet(parse("1xh200").device)


@pytest.mark.parametrize("family", MEDIANS)
def test_long_kernels_take_about_what_was_measured(family, sheet):
    table = load(H200).table(family, "bfloat16")
    grids = np.meshgrid(*[np.array(axis) for axis in table.grid], indexing="ij")
    measured = np.array([np.nan if t is None else t for t in table.seconds])
    chosen = np.nan_to_num(measured) > LONG
    sizes = tuple(grid.reshape(-1)[chosen] for grid in grids)
    found = sheet.seconds(Kernel(family, "bfloat16", sizes))
    assert np.median(np.abs(found / measured[chosen] - 1)) < MEDIANS[family]


def product(sheet, m, n, k):
    sizes = tuple(np.array([float(size)]) for size in (m, n, k))
    return float(sheet.seconds(Kernel("matmul.nt", "bfloat16", sizes))[0])


def test_a_large_square_product_runs_at_the_stated_efficiency(sheet):
    ideal = 2 * 8192**3 / sheet.device.peak("bfloat16")
    found = float(product(sheet, 8192, 8192, 8192))
    assert ideal / found == pytest.approx(sheet.device.matmul_efficiency, rel=0.01)


def test_a_wave_that_is_not_full_takes_as_long_as_a_full_one(sheet):
    full = 132 * 128  # a tile for each multiprocessor
    assert product(sheet, full + 64, 256, 4096) > 1.2 * product(sheet, full, 256, 4096)


def test_unaligned_features_are_slow(sheet):
    sizes = tuple(np.array([float(n)]) for n in (4096, 4096, 4096))
    times = [float(sheet.seconds(Kernel(f"matmul.nt{p}", "bfloat16", sizes))[0]) for p in PARITIES]
    assert times == sorted(times)
    assert times[-1] > 4 * times[0]


PARITIES = ("", ".even", ".odd")
SQUARE = (np.array([4096.0]),) * 3


def test_what_feeds_matrix_units_limits_unaligned_features_alike_on_every_generation():
    """A faster matrix unit waits longer; a unit that multiplies float32 loads any row as fast."""
    slower = []
    for name in ("v100", "a100", "h100"):
        sheet = Datasheet(parse(f"8x{name}").device)
        plain, odd = (
            sheet.seconds(Kernel(f"matmul.nt{parity}", "float16", SQUARE))[0]
            for parity in ("", ".odd")
        )
        slower.append(odd / plain)
    assert 1 < slower[0] < slower[1] < slower[2]
    a100 = Datasheet(parse("8xa100").device)
    times = [a100.seconds(Kernel(f"matmul.nt{p}", "float32", SQUARE)) for p in PARITIES]
    assert np.allclose(times, times[0])


def test_a_device_that_does_not_say_enough_is_noted():
    gpu, cpu = parse("8xa100"), parse("8xcpu")
    silent = replace(
        gpu, device=replace(gpu.device, units=None, clock_hz=0, attention_efficiency=(0, 0))
    )
    assert from_plain(silent.as_plain()) == silent
    assert assumed("kernels", gpu) == assumed("kernels", cpu) == assumed("roofline", silent) == []
    assert "states no units" in assumed("kernels", silent)[0]
    assert spread_of("kernels", silent, 8) is None is spread_of("kernels", cpu, 8)
    low, high = spread_of("kernels", gpu, 8).of(1.0)
    assert low < 1 < high


def test_a_device_without_multiprocessors_is_priced_by_the_plain_roofline():
    assert isinstance(by_kernel(parse("2xcpu"), Mesh(())), Roofline)
    assert isinstance(by_kernel(parse("2xh100"), Mesh(())), ByKernel)


def test_the_host_is_told_apart_only_where_it_runs_ahead():
    one = np.ones(1)
    step = Compute("update", "vector", "bfloat16", one, 1e9 * one, 1, None, "adamw", 1e8 * one)
    cluster = parse("1xh200")
    device, host = split_seconds(ByKernel(cluster, Mesh(())), step)
    assert device > 5e-4 > host > 0
    assert split_seconds(Roofline(cluster, Mesh(())), step)[1] == 0.0


def test_every_family_has_a_price_on_every_kind_of_device(sheet):
    for cluster in ("1xh200", "8x1080ti", "1xcpu"):
        device = parse(cluster).device
        for family, described in FAMILIES.items():
            sizes = tuple(np.array([64.0, 4096.0]) for _ in described.sizes)
            found = Datasheet(device).seconds(Kernel(family, "float32", sizes))
            assert found.shape == (2,), family
            assert np.all(np.isfinite(found)), family
            assert np.all(found > 0), family


@pytest.mark.parametrize(
    ("norm", "shape", "family"),
    [
        (nn.BatchNorm1d(16), (64, 16), "batch_norm.last"),
        (nn.BatchNorm2d(16), (4, 16, 8, 8), "batch_norm"),
    ],
)
def test_features_of_rows_are_normed_as_channels_that_lie_last(norm, shape, family):
    graph = capture(nn.Sequential(norm, nn.ReLU()), (torch.zeros(shape),), loss=torch.sum)
    subdims = find_subdims(graph, rules_of(graph))
    index = next(k for k, op in enumerate(graph.ops) if op.kind == "aten.batch_norm")
    space = Space(subdims.rules[index], np.zeros((1, 0), dtype=np.int8))
    steps = operator_steps(space, Tensors.of(graph, subdims, index), Mesh(())).steps
    found = {kernel.family for step in steps for kernel in step.work.kernels(step.phase)}
    assert {f"{family}.forward", f"{family}.backward"} <= found
