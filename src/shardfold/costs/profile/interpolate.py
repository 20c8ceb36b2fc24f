"""Times between measured sizes: the share of the least possible time, interpolated.

A family's arithmetic and traffic at the machine's best rates give a least time; how many times as
long a kernel was measured to take is a smooth function of the sizes' logarithms, and is
interpolated linearly between the corners of the cell of the grid that a size lies in. Beyond the
grid, the factor of its edge holds: work grows as the arithmetic and the traffic do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardfold.costs.profile.families import FAMILIES
from shardfold.costs.profile.profile import Fit, Rates, Table
from shardfold.graph.values import ITEM_BYTES

Values = NDArray[np.float64]
BEYOND = 2.0  # times the grid's last size: further out, it is said


def least_seconds(family: str, dtype: str, sizes: Sequence[Any], rates: Rates) -> Values:
    """The longer of a family's arithmetic and traffic at the machine's best rates."""
    found = FAMILIES[family]
    item = 1 if found.sizes == ("bytes",) else ITEM_BYTES[dtype]
    rate = rates.flops.get(dtype) or max(rates.flops.values())
    seconds = np.asarray(found.items(*sizes) * item / rates.bandwidth, dtype=np.float64)
    if found.engine == "matrix":
        seconds = np.maximum(seconds, found.flops(*sizes) / rate)
    return seconds


class Interpolated:
    """The times of one table at any sizes."""

    def __init__(self, table: Table, rates: Rates) -> None:
        self.table, self.rates = table, rates
        shape = tuple(len(axis) for axis in table.grid)
        self.logs = [np.log2(np.asarray(axis)) for axis in table.grid]
        grids = np.meshgrid(*[np.asarray(axis) for axis in table.grid], indexing="ij")
        least = least_seconds(table.family, table.dtype, grids, rates)
        times = np.array([math.nan if t is None else t for t in table.seconds]).reshape(shape)
        self.floor = float(np.nanmin(times))
        self.factors = _filled(np.log(times / least))

    def seconds(self, sizes: Sequence[Any]) -> Values:
        """Seconds at each entry of the sizes' arrays."""
        given = np.broadcast_arrays(*[np.asarray(s, dtype=np.float64) for s in sizes])
        arrays = [np.maximum(a, 1.0) for a in given]
        least = least_seconds(self.table.family, self.table.dtype, arrays, self.rates)
        found = least * np.exp(self._factor(arrays))
        return np.maximum(found, self.floor)

    def beyond(self, sizes: Sequence[Any]) -> bool:
        """Whether any entry lies far outside what was measured."""
        for axis, given in zip(self.table.grid, sizes, strict=True):
            values = np.asarray(given, dtype=np.float64)
            if len(axis) > 1 and np.any(values > BEYOND * axis[-1]):
                return True
        return False

    def _factor(self, arrays: Sequence[Values]) -> Values:
        """Linear in every logarithm, between the two values of the grid around it."""
        lows, shares = [], []
        for logs, array in zip(self.logs, arrays, strict=True):
            if len(logs) == 1:
                lows.append(np.zeros(array.shape, dtype=np.intp))
                shares.append(np.zeros(array.shape))
                continue
            at = np.clip(np.log2(array), logs[0], logs[-1])
            low = np.clip(np.searchsorted(logs, at, side="right") - 1, 0, len(logs) - 2)
            lows.append(low)
            shares.append((at - logs[low]) / (logs[low + 1] - logs[low]))
        total = np.zeros(arrays[0].shape)
        for corner in product((0, 1), repeat=len(lows)):
            weight = np.ones(arrays[0].shape)
            index = []
            for side, low, share, logs in zip(corner, lows, shares, self.logs, strict=True):
                weight = weight * (share if side else 1.0 - share)
                index.append(np.minimum(low + side, len(logs) - 1))
            total += weight * self.factors[tuple(index)]
        return total


def _filled(factors: Values) -> Values:
    """Sizes that were not measured take the factor of the nearest that was."""
    missing = np.argwhere(np.isnan(factors))
    known = np.argwhere(~np.isnan(factors))
    filled = factors.copy()
    for place in missing:
        nearest = known[np.abs(known - place).sum(axis=1).argmin()]
        filled[tuple(place)] = factors[tuple(nearest)]
    return filled


def fitted(table: Table, probes: Sequence[tuple[Sequence[float], float]], rates: Rates) -> Table:
    """The table with how far it is off at the probes."""
    if not probes:
        return table
    found = Interpolated(table, rates)
    columns = [
        np.array(column, dtype=np.float64) for column in zip(*[s for s, _ in probes], strict=True)
    ]
    measured = np.array([seconds for _, seconds in probes])
    errors = np.abs(found.seconds(columns) / measured - 1.0)
    fit = Fit(len(probes), round(float(np.median(errors)), 4), round(float(errors.max()), 4))
    return msgspec.structs.replace(table, fit=fit)
