"""Calls of every kernel family at given sizes, as PyTorch makes them in a training step.

Measures grids of kernels: a table of seconds for each, and how far off it is between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from shardfold.calibrate.grids import Grid, Plan
from shardfold.calibrate.timers import Call, Clock
from shardfold.costs.profile import ATTENTIONS, LAYOUTS, UPDATED_TOGETHER, Table
from shardfold.operators.convolution import WINDOWS
from shardfold.operators.matrix import PARITIES
from shardfold.runtime.ops.norms import BatchNorm, Shared, passes_for
from shardfold.runtime.training import UPDATES

LARGEST_HEADS = 16  # of one example; further heads are further examples
SHARING = 4  # queries that share a key, where keys are shared


@dataclass(slots=True)
class Bench:
    """Random data on a device, from which calls take their tensors without drawing anew."""

    device: str
    dtype: torch.dtype
    pool: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def take(self, *shape: int, dtype: torch.dtype | None = None, grad: bool = False) -> Tensor:
        """A tensor of random numbers; several may share their memory."""
        kind, count = dtype or self.dtype, math.prod(shape)
        pool = self.pool.get(kind)
        if pool is None or pool.numel() < count:
            pool = torch.randn(max(count, 1 << 20), device=self.device).to(kind)
            self.pool[kind] = pool
        return pool[:count].view(shape).detach().requires_grad_(grad)

    def fresh(self, *shape: int, grad: bool = False) -> Tensor:
        """A tensor of its own memory."""
        return self.take(*shape).clone().requires_grad_(grad)

    def integers(self, below: int, *shape: int) -> Tensor:
        """Random integers below a number."""
        return torch.randint(below, shape, device=self.device)


def _backward(result: Tensor, *inputs: Tensor) -> Call:
    gradient = torch.ones_like(result)
    return lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)


def _either(phase: str, call: Callable[[], Tensor], *inputs: Tensor) -> Call:
    return call if phase == "forward" else _backward(call(), *inputs)


def _matmul(layout: str, bench: Bench, m: int, n: int, k: int) -> Call:
    a = bench.take(k, m).t() if layout[0] == "t" else bench.take(m, k)
    b = bench.fresh(n, k).t() if layout[1] == "t" else bench.fresh(k, n)
    return lambda: a @ b


def _bmm(bench: Bench, b: int, m: int, n: int, k: int) -> Call:
    left, right = bench.take(b, m, k), bench.fresh(b, k, n)
    return lambda: torch.bmm(left, right)


def _attention(kind: str, phase: str, bench: Bench, heads: int, length: int, depth: int) -> Call:
    per = math.gcd(heads, LARGEST_HEADS)
    own = max(1, per // SHARING) if kind == "shared" else per
    query, key, value = (
        bench.fresh(heads // per, length, h, depth, grad=True).transpose(1, 2)
        for h in (per, own, own)
    )
    inputs = [query, key, value]
    options: dict[str, Any] = {"is_causal": kind in ("causal", "shared")}
    if kind == "bias":
        inputs.append(bench.fresh(1, per, length, length, grad=True))
        options = {"attn_mask": inputs[-1]}
    if kind == "shared":
        options["enable_gqa"] = True
    call = partial(functional.scaled_dot_product_attention, query, key, value, **options)
    return _either(phase, call, *inputs)


def _conv(window: str, phase: str, bench: Bench, b: int, c: int, n: int, side: int) -> Call:
    kernel, stride = WINDOWS[window]
    padding = (0, 0) if stride >= kernel[0] > 1 else (kernel[0] // 2, kernel[1] // 2)
    x = bench.fresh(b, c, side * stride, side * stride, grad=c > 3)
    weight = bench.fresh(n, c, *kernel, grad=True)
    call = partial(functional.conv2d, x, weight, None, stride, padding)
    return _either(phase, call, *(t for t in (x, weight) if t.requires_grad))


def _layer_norm(phase: str, bench: Bench, rows: int, columns: int) -> Call:
    x = bench.fresh(rows, columns, grad=True)
    weight, bias = (bench.fresh(columns, grad=True) for _ in range(2))
    return _either(
        phase, lambda: functional.layer_norm(x, (columns,), weight, bias), x, weight, bias
    )


def _group_norm(phase: str, bench: Bench, rows: int, columns: int) -> Call:
    """Groups of some channels each, several of them in an example."""
    groups, channels = math.gcd(rows, 32), math.gcd(columns, 8)
    shape = (rows // groups, groups * channels, columns // channels)
    x = bench.fresh(*shape, grad=True)
    weight, bias = (bench.fresh(shape[1], grad=True) for _ in range(2))
    call = partial(functional.group_norm, x, groups, weight, bias)
    return _either(phase, call, x, weight, bias)


def _depthwise(
    lies: torch.memory_format, phase: str, bench: Bench, b: int, c: int, side: int, taps: int
) -> Call:
    window = math.isqrt(taps)
    x = bench.fresh(b, c, side, side).to(memory_format=lies).requires_grad_()
    weight = bench.fresh(c, 1, window, window, grad=True)
    call = partial(functional.conv2d, x, weight, None, 1, window // 2, 1, c)
    return _either(phase, call, x, weight)


def _batch_norm(phase: str, bench: Bench, b: int, c: int, side: int) -> Call:
    x = bench.fresh(b, c, side, side, grad=True)
    weight, bias = (bench.fresh(c, grad=True) for _ in range(2))
    mean, variance = (bench.fresh(c).abs() + 1 for _ in range(2))
    call = partial(functional.batch_norm, x, mean, variance, weight, bias, True)
    return _either(phase, call, x, weight, bias)


def _split_norm(phase: str, bench: Bench, b: int, c: int, side: int) -> Call:
    """As the runner does it, without the sums over other devices."""
    x = bench.fresh(b, c, side, side, grad=True)
    weight, bias = (bench.fresh(c, grad=True) for _ in range(2))
    shared = Shared(b * side * side, 1e-5, lambda sums: sums, passes_for(x, is_traced=False))
    return _either(
        phase, lambda: cast(Tensor, BatchNorm.apply(x, weight, bias, shared)[0]), x, weight, bias
    )


def _softmax(phase: str, bench: Bench, rows: int, columns: int) -> Call:
    x = bench.fresh(rows, columns, grad=True)
    return _either(phase, lambda: torch.softmax(x, -1), x)


def _loss(phase: str, bench: Bench, rows: int, columns: int) -> Call:
    x, target = bench.fresh(rows, columns, grad=True), bench.integers(columns, rows)
    return _either(phase, lambda: functional.cross_entropy(x, target), x)


def _sum(dim: int, bench: Bench, rows: int, columns: int) -> Call:
    x = bench.take(rows, columns)
    return lambda: x.sum(dim)


def _lookup(bench: Bench, rows: int, columns: int) -> Call:
    table, at = bench.take(8192, columns), bench.integers(8192, rows)
    return lambda: functional.embedding(at, table)


def _lookup_backward(bench: Bench, rows: int, table: int, columns: int) -> Call:
    weight, at = bench.take(table, columns, grad=True), bench.integers(table, rows)
    return _backward(functional.embedding(at, weight), weight)


def _vector(bench: Bench, size: int) -> Call:
    """Two operands read, one result written."""
    count = max(1, size // (3 * bench.dtype.itemsize))
    a, b = bench.take(count), bench.fresh(count)
    return lambda: a + b


def _cast(bench: Bench, size: int) -> Call:
    """From the dtype to float32, or from float32 to bfloat16."""
    other = torch.bfloat16 if bench.dtype == torch.float32 else torch.float32
    a = bench.take(max(1, size // (bench.dtype.itemsize + other.itemsize)))
    return lambda: a.to(other)


def _strided(bench: Bench, size: int) -> Call:
    """A row of numbers broadcast over many."""
    columns = 128
    rows = max(1, size // (2 * bench.dtype.itemsize * columns))
    a, b = bench.take(rows, columns), bench.take(columns)
    return lambda: a * b


def _cat(bench: Bench, size: int) -> Call:
    """Halves of heads: one that was cut out of what is transposed, one that lies in order."""
    heads, depth = 16, 128
    rows = max(1, size // (2 * bench.dtype.itemsize * heads * depth))
    a = bench.take(1, rows, heads, depth).transpose(1, 2)[..., : depth // 2]
    b = bench.fresh(1, heads, rows, depth // 2)
    return lambda: torch.cat((b, a), -1)


def _fill(bench: Bench, size: int) -> Call:
    a = bench.take(max(1, size // bench.dtype.itemsize))
    return lambda: torch.zeros_like(a)


def _pool(kind: str, phase: str, bench: Bench, size: int) -> Call:
    """A window of 3 with stride 2: a quarter is written."""
    side = 56
    planes = max(1, int(size / (bench.dtype.itemsize * side * side * 1.25)))
    x = bench.fresh(1, planes, side, side, grad=True)
    pool = functional.max_pool2d if kind == "max" else functional.avg_pool2d
    return _either(phase, lambda: pool(x, 3, 2, 1), x)


def _update(name: str, bench: Bench, items: int) -> Call:
    parameters = [
        bench.fresh(max(1, items // UPDATED_TOGETHER), grad=True) for _ in range(UPDATED_TOGETHER)
    ]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = UPDATES[name](parameters, lr=1e-6)
    return lambda: optimizer.step()


def _phases(name: str, make: Callable[..., Call]) -> dict[str, Callable[..., Call]]:
    return {f"{name}.{phase}": partial(make, phase) for phase in ("forward", "backward")}


CALLS: Mapping[str, Callable[..., Call]] = {
    **{
        f"matmul.{layout}{parity}": partial(_matmul, layout)
        for layout in LAYOUTS
        for parity in PARITIES
    },
    "bmm": _bmm,
    **{
        f"attention.{kind}.{phase}": partial(_attention, kind, phase)
        for kind in ATTENTIONS
        for phase in ("forward", "backward")
    },
    **{
        f"conv.{window}.{phase}": partial(_conv, window, phase)
        for window in WINDOWS
        for phase in ("forward", "backward")
    },
    **_phases("layer_norm", _layer_norm),
    **_phases("group_norm", _group_norm),
    **_phases("depthwise", partial(_depthwise, torch.contiguous_format)),
    **_phases("depthwise.last", partial(_depthwise, torch.channels_last)),
    **_phases("batch_norm", _batch_norm),
    **_phases("split_norm", _split_norm),
    **_phases("softmax", _softmax),
    **_phases("loss", _loss),
    "sum_rows": partial(_sum, 1),
    "sum_columns": partial(_sum, 0),
    "lookup.forward": _lookup,
    "lookup.backward": _lookup_backward,
    "vector": _vector,
    "cast": _cast,
    "strided": _strided,
    "cat": _cat,
    "fill": _fill,
    **_phases("max_pool", partial(_pool, "max")),
    **_phases("avg_pool", partial(_pool, "avg")),
    **{f"update.{name}": partial(_update, name) for name in UPDATES},
}


Point = tuple[tuple[int, ...], float]
Watch = Callable[[str, int, int], None]


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of that name."""
    found: torch.dtype = getattr(torch, name)
    return found


def measure(
    plan: Plan, clock: Clock, watch: Watch
) -> tuple[tuple[Table, ...], dict[tuple[str, str], list[Point]]]:
    """The tables of all grids, and the times of the probes by family and dtype."""
    total = len(plan.grids)
    tables, probes = [], {}
    for number, grid in enumerate(plan.grids):
        watch(grid.family, number, total)
        bench = Bench(clock.device, dtype_of(grid.dtype))
        times = [_timed(grid, plan, sizes, bench, clock) for sizes in product(*grid.axes)]
        axes = tuple(tuple(float(v) for v in axis) for axis in grid.axes)
        tables.append(Table(grid.family, grid.dtype, axes, tuple(times)))
        found = [(sizes, _timed(grid, plan, sizes, bench, clock)) for sizes in grid.draw()]
        probes[grid.family, grid.dtype] = [(s, t) for s, t in found if t is not None]
        del bench
        if clock.device == "cuda":
            torch.cuda.empty_cache()
    return tuple(tables), probes


def _timed(
    grid: Grid, plan: Plan, sizes: Sequence[int], bench: Bench, clock: Clock
) -> float | None:
    """Seconds of one call, or None where it would be too long or too large."""
    if not plan.is_measured(grid, sizes, bench.dtype.itemsize):
        return None
    try:
        call = CALLS[grid.family](bench, *sizes)
        return _rounded(clock.seconds(call))
    except RuntimeError:  # out of memory, or no kernel for these sizes: not measured
        return None


def _rounded(seconds: float) -> float:
    """Four digits: more is noise."""
    return float(f"{seconds:.4g}")
