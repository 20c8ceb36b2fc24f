"""The sizes that are measured: a grid for every family, and probes between them.

Sizes are those that models have: tokens and features in powers of two and their halfway marks, the
planes of convolutional networks. What would take too long on the device is left out of the grid.
Probes are drawn at random between the grid's sizes: a table that predicts them well predicts what
it was not measured on.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardfold.costs.optimizers import OPTIMIZERS
from shardfold.costs.profile import FAMILIES, RELATIONS
from shardfold.operators.convolution import WINDOWS

Axes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """A family in one dtype: the values of each size, and how far the probes are rounded."""

    family: str
    dtype: str
    axes: Axes
    probes: int = 0
    multiple: tuple[int, ...] = ()  # probes are rounded to these
    exact: tuple[int, ...] = ()  # sizes that are probed at the grid's own values only
    offset: int = 0  # added to a probe's rounded sizes, so that they stay odd

    def draw(self, seed: int = 0) -> list[tuple[int, ...]]:
        """The probes: sizes between the grid's first and last, evenly in their logarithm."""
        generator = random.Random(f"{self.family} {self.dtype} {seed}")
        return [self._probe(generator) for _ in range(self.probes)]

    def _probe(self, generator: random.Random) -> tuple[int, ...]:
        found = []
        for k, axis in enumerate(self.axes):
            if k in self.exact or len(axis) == 1:
                found.append(generator.choice(axis))
                continue
            drawn = axis[0] * (axis[-1] / axis[0]) ** generator.random()
            step = self.multiple[k] if self.multiple else 1
            found.append(max(axis[0], round(drawn / step) * step))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Plan:
    """All grids of a device, and the most seconds that one call may be expected to take."""

    grids: tuple[Grid, ...]
    longest_seconds: float
    rates: Mapping[str, float] = field(default_factory=dict)  # expected, to leave out what is long
    bandwidth: float = 1e11
    largest_bytes: float = 8e9

    def is_measured(self, grid: Grid, sizes: Sequence[int], item_bytes: int) -> bool:
        """Whether a call of these sizes is expected to be short and small enough."""
        family = FAMILIES[grid.family]
        moved = family.moved_bytes(item_bytes, sizes)
        rate = self.rates[grid.dtype] if family.engine == "matrix" else self.bandwidth
        seconds = max(family.flops(*sizes) / rate, moved / self.bandwidth)
        return bool(seconds <= self.longest_seconds and moved <= self.largest_bytes)


def _powers(low: int, high: int, *, halves: bool = False) -> tuple[int, ...]:
    """Powers of two from 2**low to 2**high, with the marks halfway if `halves`."""
    found = []
    for e in range(low, high + 1):
        found.append(1 << e)
        if halves and e < high:
            found.append(3 << (e - 1))
    return tuple(found)


def cuda_plan(quick: bool = False) -> Plan:
    """The grids of a GPU: bfloat16 in detail, float32 coarsely."""
    if quick:
        return Plan(
            _quick(("bfloat16", "float32")), 5e-3, {"bfloat16": 5e14, "float32": 3e13}, 2e12
        )
    axes: Axes
    tokens = _powers(7, 15)
    fives = (640, 1280, 2560, 5120)
    features = tuple(sorted((*_powers(8, 14, halves=True), *fives, 32768, 131072)))
    bf, single = "bfloat16", "float32"
    grids = [
        Grid(f"matmul.{layout}", bf, axes, 60, (8, 8, 8))
        for layout, axes in (
            ("nt", (tokens, features, features)),
            ("nn", (tokens, features, features)),
            ("tn", (features, features, tokens)),
        )
    ]
    wide, narrow, some = (8193, 32769, 65537), (512, 1024, 2048, 4096), (1024, 4096, 16384)
    for parity, add in (("even", 1), ("odd", 0)):
        odd = tuple(w + add for w in wide)
        for layout, axes in (
            ("nt", (some, odd, narrow)),
            ("nn", (some, narrow, odd)),
            ("tn", (odd, narrow, some)),
        ):
            grids.append(Grid(f"matmul.{layout}.{parity}", bf, axes))
    coarse = _powers(9, 13, halves=False)
    for layout in ("nt", "nn", "tn"):
        grids.append(Grid(f"matmul.{layout}", single, (coarse, coarse, coarse), 10, (8, 8, 8)))
    for dtype in (bf, single):
        axes = ((8, 64, 256), *[(64, 256, 1024)] * 3)
        grids.append(Grid("bmm", dtype, axes, 10, (8, 8, 8, 8)))
    heads, lengths = (16, 64, 256, 1024), _powers(7, 13)
    for phase in ("forward", "backward"):
        for kind in ("full", "causal", "shared"):
            axes = (heads, lengths, (32, 64, 96, 128, 256))
            grids.append(Grid(f"attention.{kind}.{phase}", bf, axes, 12, (16, 8, 1), (2,)))
        axes = ((16, 64, 256), (128, 256, 512, 1024, 2048), (64,))
        grids.append(Grid(f"attention.bias.{phase}", bf, axes, 6, (16, 8, 1)))
        grids.append(Grid(f"attention.causal.{phase}", single, ((16, 64, 256), (256, 1024), (64,))))
        grids += _convolutions(phase, bf)
        rows, columns = _powers(8, 16), _powers(8, 14)
        grids.append(Grid(f"layer_norm.{phase}", bf, (rows, columns), 15, (1, 8)))
        grids.append(Grid(f"layer_norm.{phase}", single, (rows[::2], columns[::2])))
        for dtype in (bf, single):
            axes = (_powers(8, 14)[::2], _powers(10, 20)[::2])
            grids.append(Grid(f"group_norm.{phase}", dtype, axes, 4, (32, 8)))
            axes = ((16, 64, 256), (96, 384, 1024), (7, 14, 28, 56), (9, 25, 49))
            for lies in ("", ".last"):
                family = f"depthwise{lies}.{phase}"
                grids.append(Grid(family, dtype, axes, 4, (1, 8, 1, 1), (3,)))
        planes = ((16, 64, 256), _powers(5, 11), (7, 14, 28, 56, 112))
        for norm in ("batch_norm", "split_norm"):
            grids.append(Grid(f"{norm}.{phase}", bf, planes, 15, (1, 8, 1)))
            grids.append(Grid(f"{norm}.{phase}", single, (planes[0], (64, 512), (7, 14, 56))))
        grids.append(
            Grid(f"softmax.{phase}", bf, (_powers(8, 18, halves=False)[::2], _powers(6, 12)[::2]))
        )
        grids.append(Grid(f"softmax.{phase}", single, (_powers(8, 18)[::2], _powers(3, 12)[::3])))
        classes = (1000, 8192, 32768, 50257, 131072)
        for dtype in (bf, single):
            grids.append(Grid(f"loss.{phase}", dtype, (_powers(6, 15)[::3], classes), 8))
            for pool in ("max_pool", "avg_pool"):
                grids.append(Grid(f"{pool}.{phase}", dtype, (_powers(20, 30)[::2],)))
    for dtype in (bf, single):
        for name in ("vector", "cast", "strided"):
            grids.append(Grid(name, dtype, (_powers(12, 32),), 12, (128,)))
        grids.append(Grid("cat", dtype, (_powers(14, 32),), 12, (128,)))
        grids.append(Grid("fill", dtype, (_powers(12, 31),)))
        grids.append(
            Grid("sum_rows", dtype, (_powers(8, 20)[::2], _powers(4, 16)[::2]), 10, (1, 8))
        )
        grids.append(Grid("sum_columns", dtype, (_powers(8, 16), _powers(8, 16)), 10, (1, 8)))
        grids.append(Grid("lookup.forward", dtype, (_powers(8, 16)[::2], _powers(8, 13))))
        axes = (_powers(8, 16)[::2], (512, 8192, 32768, 131072), (256, 1024, 4096))
        grids.append(Grid("lookup.backward", dtype, axes, 6, (1, 1, 8)))
        for name in OPTIMIZERS:
            sizes = (1 << 20, 1 << 23, 1 << 26, 1 << 29) if name == "adamw" else (1 << 23, 1 << 27)
            grids.append(Grid(f"update.{name}", dtype, (sizes,)))
    return Plan(tuple(grids), 0.02, {bf: 5e14, single: 3e13}, 2e12, 2.5e10)


def _convolutions(phase: str, dtype: str) -> list[Grid]:
    batches, sides = (16, 64, 256), (7, 14, 28, 56)
    narrow = (32, 64, 96, 128, 192, 256, 384, 512)
    wide = (48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
    some = (64, 128, 256, 512)
    axes: Mapping[str, Axes] = {
        "1x1": (batches, wide, wide, (7, 8, 14, 17, 28, 35, 56)),
        "1x1/2": (batches, (256, 512, 1024), (128, 512, 2048), (7, 14, 28)),
        "3x3": (batches, narrow, narrow, (7, 8, 14, 17, 28, 35, 56, 147)),
        "3x3/2": (batches, some, some, sides),
        "5x5": (batches, (32, 64, 128), (32, 64, 128), (14, 28, 56)),
        "1x7": (batches, (96, 192, 384), (96, 192, 384), (8, 17, 34)),
        "7x7/2": (batches, (3,), (64,), (56, 112)),
        "16x16/16": (batches, (3,), (384, 768, 1280), (14,)),
    }
    probes = {"1x1": 15, "3x3": 15}
    return [
        Grid(f"conv.{window}.{phase}", dtype, axes[window], probes.get(window, 0), (1, 8, 8, 1))
        for window in WINDOWS
    ] + [
        Grid(f"conv.3x3/2.{phase}", "float32", ((16, 64), (64, 256), (64, 256), (14, 56))),
        Grid(f"conv.3x3.{phase}", "float32", ((16, 64), (64, 256), (64, 256), (14, 56))),
        Grid(f"conv.1x1.{phase}", "float32", ((16, 64), (64, 512), (64, 512), (14, 56))),
    ]


def cpu_plan(quick: bool = False) -> Plan:
    """The grids of one process on a CPU, in float32."""
    if quick:
        return Plan(_quick(("float32",)), 0.02, {"float32": 5e10}, 5e9, 2e8)
    axes: Axes
    single = "float32"
    side = (32, 64, 128, 256, 512, 1024)
    tall = (16, 64, 256, 1024, 4096)
    grids = [
        Grid(f"matmul.{layout}", single, axes, 10, (4, 4, 4))
        for layout, axes in (
            ("nt", (tall, (*side, 4096), side)),
            ("nn", (tall, side, (*side, 4096))),
            ("tn", ((*side, 4096), side, tall)),
        )
    ]
    grids.append(Grid("bmm", single, ((4, 16, 64), *[(16, 64, 256)] * 3), 6))
    for phase in ("forward", "backward"):
        for kind in ("full", "causal", "shared", "bias"):
            axes = ((8, 32, 128), (32, 64, 128, 256), (32, 64))
            grids.append(Grid(f"attention.{kind}.{phase}", single, axes))
        for window, at in (
            ("1x1", ((4, 16), (32, 128), (32, 128), (7, 14, 28))),
            ("3x3", ((4, 16), (16, 64, 256), (16, 64, 256), (7, 14, 28))),
            ("5x5", ((4, 16), (16, 64), (16, 64), (7, 14, 28))),
            ("3x3/2", ((4, 16), (32, 128), (32, 128), (7, 14))),
        ):
            grids.append(Grid(f"conv.{window}.{phase}", single, at, 2))
        table = ((16, 128, 1024, 8192), (64, 256, 1024, 4096))
        grids.append(Grid(f"layer_norm.{phase}", single, table, 4))
        grids.append(Grid(f"softmax.{phase}", single, table, 4))
        grids.append(Grid(f"loss.{phase}", single, ((16, 128, 1024), (128, 1024, 8192)), 4))
        for norm in ("batch_norm", "split_norm"):
            grids.append(Grid(f"{norm}.{phase}", single, ((4, 16), (16, 64, 256), (7, 14, 28))))
        grids.append(Grid(f"group_norm.{phase}", single, ((32, 256), (1024, 16384)), 2, (32, 8)))
        windows = ((4, 16), (32, 256), (7, 28), (9, 49))
        for lies in ("", ".last"):
            grids.append(Grid(f"depthwise{lies}.{phase}", single, windows, 2, (), (3,)))
        for pool in ("max_pool", "avg_pool"):
            grids.append(Grid(f"{pool}.{phase}", single, (_powers(14, 24)[::2],)))
    for name in ("vector", "cast", "strided", "cat", "fill"):
        grids.append(Grid(name, single, (_powers(10, 27),), 6))
    for name in ("sum_rows", "sum_columns", "lookup.forward"):
        grids.append(Grid(name, single, ((16, 128, 1024, 8192), (64, 256, 1024, 4096)), 4))
    axes = ((64, 512, 4096), (64, 1024, 8192), (64, 256, 1024))
    grids.append(Grid("lookup.backward", single, axes, 4))
    for name in OPTIMIZERS:
        sizes = (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 24)
        grids.append(Grid(f"update.{name}", single, (sizes,)))
    return Plan(tuple(grids), 0.1, {single: 3e10}, 5e9, 6e8)


def _quick(dtypes: Sequence[str]) -> tuple[Grid, ...]:
    """Two sizes a side: to try the machinery, not to plan with."""
    small: Mapping[int, Axes] = {
        1: ((1 << 14, 1 << 18),),
        2: ((196, 1568), (32, 64)),
        3: ((32, 64), (32, 64), (32, 64)),
        4: ((2, 4), (16, 32), (16, 32), (9, 25)),
    }
    return tuple(
        Grid(family, dtype, small[len(FAMILIES[family].sizes)], 1)
        for dtype in dtypes
        for family in FAMILIES
        if not family.endswith((".odd", ".even")) and "16x16" not in family
        if family not in RELATIONS
    )
