"""How long a kernel takes on a device that nobody measured: from its datasheet and its sizes.

A kernel takes the longest of what its engines have to do, and the gap before it.

- Products run in tiles on multiprocessors, one wave of tiles after another: a wave that is not
  full takes as long as a full one, a tile has to fill its pipeline before it multiplies, and where
  tiles are few the reduction is split. A library picks the best of some shapes of tiles.
- Attention is products of tiles of queries with all keys before them, at the share of the peak
  that the exponentials between them leave; a causal mask wastes a part of the tiles that it cuts.
- What passes over memory runs at a share of its bandwidth, unless it addresses its elements one by
  one (a broadcast, a transposed operand, a widening cast): then multiprocessors are the limit. What
  works row by row pays for every row.

The shares were read off kernels that ran alone on an H200 (benchmarks/profiles/h200.json, 9,690
products and 13,947 others); multiprocessors, clock, peak rates and bandwidth are the device's
own. `docs/explanation/costs.md` says how far off they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardfold.cluster.hardware import Device
from shardfold.costs.optimizers import OPTIMIZERS
from shardfold.costs.profile import FAMILIES, Rates, least_seconds
from shardfold.costs.steps import Values
from shardfold.graph.graph import ITEM_BYTES
from shardfold.operators import Kernel
from shardfold.operators.convolution import FEW, WINDOWS

# Products: the sides of tiles, and what a tile of that shape loses against the best.
TILES = (
    *((128, 256, 1.0), (256, 128, 1.0), (192, 192, 1.0), (128, 128, 1.12)),
    *((64, 128, 1.3), (128, 64, 1.3), (64, 64, 1.6)),
)
FILL = 200.0  # steps of a tile's reduction that filling its pipeline takes
SPLITS = (1, 2, 4, 8)  # of a reduction
MORE_SPLITS = (*SPLITS, 16, 32)  # of that of a convolution's weights, over all points
LARGE = 8192.0  # the side of the product at which a device's efficiency is stated
# FLOP in a cycle of a multiprocessor whose rows are no multiple of 16 bytes: it loads them item by
# item, and its matrix units wait, on every generation alike.
UNALIGNED = {".even": 1170.0, ".odd": 537.0}
VECTOR_UNITS = ("float32", "float64")  # multiply these: they read any row as fast

GAP_SECONDS = 2e-6  # between a kernel and the one that waits for it
# A convolution is a product at a part of the rate, and moves its channels together and apart again.
CONVOLUTIONS = {"forward": (1.3, 0.35, 4.0), "backward": (1.0, 1.0, 10.0)}
SINGLE_CONVOLUTION = 1.8  # times as long in TF32, which is what float32 means there
VECTOR_SHARE = 0.36  # of the vector units' peak: forward with few channels
TAPS_A_CYCLE = 32.0  # of a depthwise convolution with channels last, on one multiprocessor

# Attention: queries and keys that a tile costs beside its own.
QUERIES = 128.0
MASKED = 150.0  # keys that a causal tile computes in vain
WASTED = {"forward": 130.0, "backward": 330.0}
# Features beside which exponentials weigh as much as products: a multiprocessor makes as many
# exponentials in a cycle on every generation, but not as many products.
DEPTH, DEPTH_FLOPS = 88.0, 3784.0
HEAD_STEP = 64.0  # features that a tile is padded to
WIDE_BACKWARD = 0.75  # of what 128 features reach: more do not fit beside their gradients
BIAS_RATE, BIAS_WASTED = 0.185, 40.0  # a bias with a gradient takes another, slower kernel


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass over memory: its share of the bandwidth, and what its elements and rows cost.

    `cycles` of one multiprocessor for each item, and `row_cycles` for each row; `wide` is the
    number of columns at which it runs at half its rate, `small` the points of such a plane; with
    fewer channels than `narrow`, multiprocessors are idle; `calls` are the kernels that it is.
    `parts_cycles`: what a row costs where so many narrow rows are summed that it is done in parts.
    `is_padded`: rows that threads hold are a power of two to them.
    """

    share: float
    cycles: float = 0.0
    row_cycles: float = 0.0
    wide: float = 0.0
    narrow: float = 0.0
    small: float = 0.0
    calls: float = 1.0
    parts_cycles: float = 0.0
    is_padded: bool = False


# The gradient of a table: few rows are added one after the other; more are sorted first, and summed
# in pieces of rows of one place, of which each item is so many bytes' work.
FEW_ROWS, ROW_CYCLES = 3072.0, 47.0
SORT_SECONDS, PIECE_ROWS, PIECE_BYTES = 105e-6, 10.0, 55.0

THREADS_ROW, WARP = 1024.0, 32.0  # the longest row that threads hold; threads that go together
MANY_ROWS = 65536.0  # beyond so many, sums for a weight may be taken in parts

EFFICIENT = 0.89  # of its bandwidth: what copies reach on the H200
ONE_BY_ONE = 0.69  # cycles of a multiprocessor for an element that is addressed by itself
# As they ran in the steps of 45 models on an H200 (PyTorch 2.11): an element whose neighbours in
# the other operand are elsewhere in memory; one that is converted on the way, alone or broadcast.
ACROSS, MIXED, MIXED_BROADCAST = 1.55, 0.78, 1.3
PASSES: Mapping[str, Pass] = {
    "vector": Pass(0.92),
    "cast": Pass(0.92),
    "strided": Pass(0.92, cycles=ONE_BY_ONE),
    "strided.across": Pass(0.92, cycles=ACROSS),
    "strided.mixed": Pass(0.92, cycles=MIXED_BROADCAST),
    "mixed": Pass(0.92, cycles=MIXED),
    "gelu.backward": Pass(0.92, cycles=0.32),  # of three passes
    # Bits by position, as our kernels took on an H200: of elements, and of attention's weights.
    "dropout.forward": Pass(0.75, cycles=0.39),
    "dropped.forward": Pass(0.92, cycles=0.55),
    "dropped.backward": Pass(0.92, cycles=1.5),
    "cat": Pass(0.92, cycles=2 * ONE_BY_ONE),
    "fill": Pass(0.85),
    "layer_norm.forward": Pass(0.6, cycles=0.5, row_cycles=260, calls=1.5),
    "layer_norm.backward": Pass(0.8, cycles=0.35, row_cycles=1000, calls=2, parts_cycles=150),
    "group_norm.forward": Pass(0.9, cycles=0.75, row_cycles=400, calls=3),
    "group_norm.backward": Pass(0.9, cycles=0.57, row_cycles=1000, calls=6),
    "batch_norm.forward": Pass(0.8, cycles=0.6, narrow=300, small=147, calls=2),
    "batch_norm.backward": Pass(0.8, cycles=0.5, narrow=400, calls=2),
    "batch_norm.last.forward": Pass(0.8, cycles=0.67, calls=4),
    "batch_norm.last.backward": Pass(0.8, cycles=0.34, calls=4),
    "split_norm.forward": Pass(0.4, cycles=1.0, row_cycles=2000, calls=18),
    "split_norm.backward": Pass(0.4, row_cycles=2000, calls=12),
    "softmax.forward": Pass(0.6, cycles=0.5, is_padded=True),
    "softmax.backward": Pass(0.5, cycles=0.5, calls=2, is_padded=True),
    "loss.forward": Pass(0.5, cycles=0.5, row_cycles=130, calls=5),
    "loss.backward": Pass(0.7, row_cycles=260, calls=4),
    "loss.across.forward": Pass(0.5, cycles=1.65, calls=5),
    "loss.across.backward": Pass(0.5, cycles=0.55, calls=4),  # of four passes
    "resize.forward": Pass(0.4, cycles=2.1),
    "resize.backward": Pass(0.4, cycles=4.0),
    "sum_rows": Pass(0.8, row_cycles=60, calls=1.5),
    "sum_columns": Pass(0.92, row_cycles=130, wide=400, calls=4),
    "lookup.forward": Pass(0.92),
    "max_pool.forward": Pass(0.4, cycles=1.5, calls=1.5),
    "max_pool.backward": Pass(0.4, cycles=4.0, calls=4),
    "avg_pool.forward": Pass(0.4, cycles=1.5),
    "avg_pool.backward": Pass(0.4, cycles=6.0, calls=4),
    **{
        f"update.{each.name}": Pass(0.92 * each.memory_passes / each.passes_of_torch)
        for each in OPTIMIZERS.values()
    },
}


@dataclass(frozen=True, slots=True)
class Datasheet:
    """Seconds of kernels by a device's datasheet."""

    device: Device

    def seconds(self, kernel: Kernel) -> Values:
        """Seconds of one kernel, for each entry of its sizes."""
        given = np.broadcast_arrays(*[np.asarray(s, dtype=np.float64) for s in kernel.sizes])
        sizes: list[Values] = [np.maximum(size, 1.0) for size in given]
        family, dtype = kernel.family, kernel.dtype
        if family == "product" or not self._units:
            return self._plain(family, dtype, sizes)
        if family.startswith("matmul"):
            m, n, k = sizes
            return self._product(dtype, m, n, k, align=family[len("matmul.nt") :])
        if family == "bmm":
            b, m, n, k = sizes
            return self._product(dtype, m, n, k, many=b)
        if family.startswith("conv."):
            return self._convolution(family, dtype, *sizes)
        if family.startswith("depthwise"):
            return self._depthwise(family, dtype, *sizes)
        if family.startswith("attention"):
            return self._attention(family, dtype, *sizes)
        if family == "lookup.backward":
            return self._table_gradient(dtype, *sizes)
        return self._pass(family, dtype, sizes)

    def _plain(self, family: str, dtype: str, sizes: Sequence[Values]) -> Values:
        """The longer of operations and traffic, whatever the shape."""
        rate = self._peak(dtype) * self.device.matmul_efficiency
        bandwidth = self._bandwidth(EFFICIENT)
        if family == "product":
            flops, moved = sizes
            return self._gap() + np.maximum(flops / rate, moved / bandwidth)
        return self._gap() + least_seconds(family, dtype, sizes, Rates({dtype: rate}, bandwidth))

    def update_seconds(self, optimizer: str, moved: Values) -> Values:
        """Seconds of an update that passes over so many bytes, among many others."""
        share = PASSES[f"update.{optimizer}"].share if self._units else EFFICIENT
        return moved / self._bandwidth(share)

    # Engines

    def _gap(self, calls: float = 1.0) -> float:
        return calls * GAP_SECONDS

    def _bandwidth(self, share: float) -> float:
        """Shares are of an H200's bandwidth: other devices reach less of theirs, or more."""
        return self.device.memory_bandwidth * share * self.device.memory_efficiency / EFFICIENT

    @property
    def _units(self) -> int:
        return self.device.units or 0

    @property
    def _cycles(self) -> float:
        """Cycles of all multiprocessors in a second."""
        return self._units * self.device.clock_hz

    def _peak(self, dtype: str) -> float:
        """The matrix rate of a dtype; of one that the device lacks, that of the slowest."""
        known = dict(self.device.peak_flops)
        if dtype == "float8":  # nothing else stands for it
            return self.device.peak(dtype)
        return known.get(dtype) or min(known.values())

    def _tile_rate(self, dtype: str) -> float:
        """FLOP/s inside tiles: what makes a large square product as efficient as stated."""
        units, side = self._units, LARGE
        tiles = side * side / (128 * 256)
        waves = np.ceil(tiles / units) * units / tiles
        return float(self._peak(dtype) * self.device.matmul_efficiency * waves * (1 + FILL / side))

    # Families

    def _product(
        self,
        dtype: str,
        m: Values,
        n: Values,
        k: Values,
        many: Values | float = 1.0,
        align: str = "",
    ) -> Values:
        """The tiles, or the traffic."""
        work = self._tiles(dtype, m, n, k, many)
        if align in UNALIGNED and dtype not in VECTOR_UNITS:
            fed = UNALIGNED[align] * self._cycles
            work = work * max(1.0, self._tile_rate(dtype) / fed)
        read, written = ITEM_BYTES[dtype], max(ITEM_BYTES[dtype], 2)  # float8 leaves bf16
        moved = many * ((m * k + n * k) * read + m * n * written)
        return self._gap() + np.maximum(work, moved / self._bandwidth(0.92))

    def _tiles(
        self,
        dtype: str,
        m: Values,
        n: Values,
        k: Values,
        many: Values | float = 1.0,
        splits: Sequence[int] = SPLITS,
    ) -> Values:
        """The best shape of tiles, and of splits of the reduction."""
        rate, units, moved = self._tile_rate(dtype), self._units, self._bandwidth(0.92)
        # All shapes and splits at once: along the first two axes.
        high, wide, loss = (each[:, None, None] for each in np.array(TILES).T)
        split = np.array(splits, dtype=np.float64)[:, None]
        tiles = many * np.ceil(m / high) * np.ceil(n / wide)
        waves = np.ceil(tiles * split / units)
        work = waves * units * 2.0 * high * wide * (k / split + FILL) * loss / rate
        sums = np.where(split > 1, 8.0 * many * m * n / moved, 0.0)
        best: Values = (work + sums).min(axis=(0, 1))
        return best

    def _convolution(
        self, family: str, dtype: str, b: Values, c: Values, n: Values, side: Values
    ) -> Values:
        """A product with the windows of the input; backward, one for each operand."""
        _, window, *lies, phase = family.split(".")
        (high, wide), stride = WINDOWS[window]
        slower, cycles, calls = CONVOLUTIONS[phase]
        if lies:  # channels are together already
            slower, cycles = 1.0, 0.0
        engine = dtype
        if dtype == "float32" and "tf32" in self.device.dtypes:
            engine, slower, cycles = "tf32", SINGLE_CONVOLUTION, 0.0
        rows, taps = b * side * side, high * wide * np.maximum(c, FEW)
        # Of a window of one point, a product reads planes as they lie, if in steps of 16 bytes.
        is_plain = (window == "1x1") & (np.rint(side * side) % FEW == 0)
        rate, each = np.where(is_plain, 1.0, slower), np.where(is_plain, 0.0, cycles)
        if phase == "forward":
            work = self._tiles(engine, rows, n, taps)
            vector = 2.0 * rows * n * high * wide * c / (VECTOR_SHARE * self._peak("float32"))
            work = np.where(c < FEW, np.maximum(work, vector / rate), work)
        else:
            work = self._tiles(engine, rows, taps, n)
            work = work + self._tiles(engine, taps, n, rows, splits=MORE_SPLITS)
        moved = b * c * (side * stride) ** 2 + rows * n
        passes = (1.0 if phase == "forward" else 2.0) * moved * ITEM_BYTES[dtype]
        least = passes / self._bandwidth(EFFICIENT)
        return self._gap(calls) + np.maximum(work * rate, least) + moved * each / self._cycles

    def _depthwise(
        self, family: str, dtype: str, b: Values, n: Values, side: Values, taps: Values
    ) -> Values:
        """A multiplication on the vector units for each tap of each element.

        With channels last, taps are read once for many; else backward is slow on small planes.
        """
        items = b * n * side * side
        is_forward = family.endswith("forward")
        if "last" in family:
            cycles = (taps / TAPS_A_CYCLE + 0.5) * (1.0 if is_forward else 3.0)
        else:
            cycles = taps / 6.0 + 0.9
            cycles = cycles if is_forward else 2.8 * cycles * (1 + 7.0 / side)
        traffic = 2.0 * items * ITEM_BYTES[dtype] / self._bandwidth(0.5)
        calls = 1.0 if is_forward else 3.0
        return self._gap(calls) + np.maximum(items * cycles / self._cycles, calls * traffic)

    def _attention(
        self, family: str, dtype: str, heads: Values, length: Values, depth: Values
    ) -> Values:
        _, kind, phase = family.split(".")
        share = 1.0 if kind in ("full", "bias") else 0.5
        times, best = 1.0, self.device.attention_efficiency[0]
        if phase == "backward":
            times, best = 2.5, self.device.attention_efficiency[1]
        deep = DEPTH * self._peak(dtype) / self._cycles / DEPTH_FLOPS
        depth = np.ceil(depth / HEAD_STEP) * HEAD_STEP
        reached = np.minimum(depth * (128.0 + deep) / (128.0 * (depth + deep)), 1.05)
        if phase == "backward":
            reached = np.where(depth > 128.0, WIDE_BACKWARD, reached)
        rate = self._peak(dtype) * best * reached
        wasted = WASTED[phase] + (MASKED if share < 1 else 0.0)
        if kind == "bias":
            rate, wasted = rate * BIAS_RATE, BIAS_WASTED
        keys = share * length + wasted
        tiles = heads * np.ceil(length / QUERIES)
        full = np.maximum(self._units / tiles, 1.0)
        work = times * 4.0 * heads * length * keys * depth * full / rate
        each = heads * length * depth * ITEM_BYTES[dtype]
        moved = times * 4.0 * each / self._bandwidth(0.8)
        # Gradients of keys that queries share are written for every query, and summed.
        sums = 4.0 * each / self._bandwidth(0.8) if family == "attention.shared.backward" else 0.0
        return self._gap(2.0 if phase == "forward" else 3.0) + np.maximum(work, moved) + sums

    def _table_gradient(self, dtype: str, rows: Values, table: Values, wide: Values) -> Values:
        item, bandwidth = ITEM_BYTES[dtype], self._bandwidth(PASSES["fill"].share)
        places = table * -np.expm1(-rows / table)  # that are met, of rows at random
        pieces = PIECE_BYTES * (rows / PIECE_ROWS + places) * wide
        moved = item * (rows + table) * wide
        is_sorted = rows > FEW_ROWS
        each = np.where(is_sorted, SORT_SECONDS, rows * ROW_CYCLES / self.device.clock_hz)
        return self._gap() + each + (moved + np.where(is_sorted, pieces, 0.0)) / bandwidth

    def _pass(self, family: str, dtype: str, sizes: Sequence[Values]) -> Values:
        known, how = FAMILIES[family], PASSES[family]
        if how.is_padded:
            rows, wide = sizes
            padded = 2.0 ** np.ceil(np.log2(wide))
            sizes = [rows, np.where(wide <= THREADS_ROW, padded, wide)]
        moved = known.moved_bytes(ITEM_BYTES[dtype], sizes)
        items = moved / (2 * ITEM_BYTES[dtype])  # that are written
        cycles = how.cycles
        if family == "cast" and ITEM_BYTES[dtype] < 4:  # a widening cast
            items, cycles = moved / (ITEM_BYTES[dtype] + 4), ONE_BY_ONE
        seconds: Values = np.asarray(moved / self._bandwidth(how.share))
        if how.wide:
            seconds = seconds * (1 + how.wide / sizes[1])
        if how.row_cycles:
            each: Values | float = how.row_cycles
            if how.parts_cycles:
                in_parts = (sizes[0] > MANY_ROWS) & (sizes[1] / WARP < self._units / 2)
                each = np.where(in_parts, how.parts_cycles, each)
            seconds = seconds + sizes[0] * each / self._cycles
        alone: Values = np.asarray(items * cycles / self._cycles)
        if how.small:
            alone = alone * (1 + how.small / sizes[2] ** 2)
        if how.narrow:
            alone = alone * np.maximum(how.narrow / sizes[1], 1.0)
        return self._gap(how.calls) + np.maximum(seconds, alone)
