"""Measures grids of kernels: a table of seconds for each, and how far off it is between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import torch

from shardfold.calibrate.grids import Grid, Plan
from shardfold.calibrate.kernels import CALLS, Bench
from shardfold.calibrate.timing import Clock
from shardfold.costs.profile import Table

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
