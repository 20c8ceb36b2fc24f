"""A profile of a machine: kernel families, the file, and times between measured sizes.

A kernel family is a kind of kernel whose time depends on a few sizes: a product of m x k and k x n,
a sum over the rows of a matrix, a pass over so many bytes. Its arithmetic and its traffic give the
least time that any device could take; what a device is measured to take beyond that varies slowly
with the sizes, so it can be interpolated between them.

A profile is a versioned file that checks itself. It holds a table of seconds for each kernel family
and dtype on a grid of sizes, what the host takes to launch each kind of operator, and collectives
by size and group; with the environment, and with how far the tables are off at sizes between the
grid's. A digest over the contents tells a file that was edited by hand.

A family's arithmetic and traffic at the machine's best rates give a least time; how many times as
long a kernel was measured to take is a smooth function of the sizes' logarithms, and is
interpolated linearly between the corners of the cell of the grid that a size lies in. Beyond the
grid, the factor of its edge holds: work grows as the arithmetic and the traffic do.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardfold.costs.optimizers import OPTIMIZERS
from shardfold.errors import ProfileError
from shardfold.graph.graph import ITEM_BYTES
from shardfold.operators.convolution import WINDOWS
from shardfold.operators.matrix import PARITIES
from shardfold.versioned_json import Document

Sizes = tuple[Any, ...]  # one number or array for each name


@dataclass(frozen=True, slots=True)
class Family:
    """The sizes of a kind of kernel by name, its operations, and the items that it moves."""

    sizes: tuple[str, ...]
    flops: Callable[..., Any]
    items: Callable[..., Any]
    engine: str = "vector"

    def moved_bytes(self, item_bytes: int, sizes: Sequence[Any]) -> Any:
        """The bytes that a kernel moves; of some families, that is its size."""
        return self.items(*sizes) * (1 if self.sizes == ("bytes",) else item_bytes)


def _product(m: Any, n: Any, k: Any) -> Any:
    return 2.0 * m * n * k


def _matrices(m: Any, n: Any, k: Any) -> Any:
    return 1.0 * m * k + n * k + m * n


def _conv(taps: int, stride: int, times: float) -> Family:
    """Batch, channels in and out, and the side of the result."""

    def flops(b: Any, c: Any, n: Any, side: Any) -> Any:
        return times * 2.0 * b * c * n * side * side * taps

    def items(b: Any, c: Any, n: Any, side: Any) -> Any:
        return times * (b * c * (side * stride) ** 2 + b * n * side * side + 1.0 * c * n * taps)

    return Family(("b", "c", "n", "side"), flops, items, "matrix")


def _depthwise(times: float) -> Family:
    """Batch, channels, the side of the result, and the taps of a window."""

    def flops(b: Any, c: Any, side: Any, taps: Any) -> Any:
        return times * 2.0 * b * c * side * side * taps

    def items(b: Any, c: Any, side: Any, taps: Any) -> Any:
        return times * 2.0 * b * c * side * side

    return Family(("b", "c", "side", "taps"), flops, items)


def _attention(times: float, share: float, scores: float = 0.0) -> Family:
    """Heads (of all examples), positions, and the features of a head."""

    def flops(heads: Any, length: Any, depth: Any) -> Any:
        return times * share * 4.0 * heads * length * length * depth

    def items(heads: Any, length: Any, depth: Any) -> Any:
        return times * (4.0 * heads * length * depth + scores * heads * length * length)

    return Family(("heads", "length", "depth"), flops, items, "matrix")


def _rows(passes: float) -> Family:
    def flops(rows: Any, columns: Any) -> Any:
        return 5.0 * rows * columns

    def items(rows: Any, columns: Any) -> Any:
        return passes * rows * columns

    return Family(("rows", "columns"), flops, items)


def _planes(passes: float) -> Family:
    def flops(b: Any, c: Any, side: Any) -> Any:
        return 5.0 * b * c * side * side

    def items(b: Any, c: Any, side: Any) -> Any:
        return passes * b * c * side * side

    return Family(("b", "c", "side"), flops, items)


def _bytes() -> Family:
    """A pass over memory; the size is in bytes, so that an item is a byte."""
    return Family(("bytes",), lambda n: 0.0 * n, lambda n: 1.0 * n)


def _lookup_backward(rows: Any, table: Any, columns: Any) -> Any:
    return 2.0 * rows * columns + 1.0 * table * columns


LAYOUTS = ("nt", "nn", "tn")  # of the two matrices: t is stored transposed
ATTENTIONS = {"full": 1.0, "causal": 0.5, "shared": 0.5, "bias": 1.0}
UPDATED_TOGETHER = 8  # parameters of an update, of equal size
PASSES = ("vector", "cast", "strided", "cat", "fill", "max_pool.forward", "max_pool.backward")
POOLS = ("avg_pool.forward", "avg_pool.backward")
# What no profile has: priced as another family, times what the datasheet says of the two.
RELATIONS: Mapping[str, str] = {
    "strided.across": "strided",
    "strided.mixed": "strided",
    "mixed": "cast",
    "gelu.backward": "vector",
    "dropout.forward": "vector",
    "dropped.forward": "vector",
    "dropped.backward": "vector",
    **{
        f"{name}.{phase}": f"{like}.{phase}"
        for name, like in (
            *(("loss.across", "loss"), ("resize", "avg_pool"), ("batch_norm.last", "batch_norm")),
            *((f"conv.{window}.last", f"conv.{window}") for window in WINDOWS),
        )
        for phase in ("forward", "backward")
    },
}

FAMILIES: Mapping[str, Family] = {
    **{
        f"matmul.{layout}{parity}": Family(("m", "n", "k"), _product, _matrices, "matrix")
        for layout in LAYOUTS
        for parity in PARITIES
    },
    "bmm": Family(
        ("b", "m", "n", "k"),
        lambda b, m, n, k: b * _product(m, n, k),
        lambda b, m, n, k: b * _matrices(m, n, k),
        "matrix",
    ),
    **{
        f"attention.{kind}.{phase}": _attention(times, share, 4.0 if kind == "bias" else 0.0)
        for kind, share in ATTENTIONS.items()
        for phase, times in (("forward", 1.0), ("backward", 2.5))
    },
    **{
        f"conv.{name}{lies}.{phase}": _conv(kernel[0] * kernel[1], stride, times)
        for name, (kernel, stride) in WINDOWS.items()
        for lies in ("", ".last")
        for phase, times in (("forward", 1.0), ("backward", 2.0))
    },
    **{
        f"depthwise{lies}.{phase}": _depthwise(times)
        for lies in ("", ".last")
        for phase, times in (("forward", 1.0), ("backward", 2.0))
    },
    "group_norm.forward": _rows(3.0),
    "group_norm.backward": _rows(5.0),
    "layer_norm.forward": _rows(2.0),
    "layer_norm.backward": _rows(5.0),
    **{f"batch_norm{lies}.forward": _planes(3.0) for lies in ("", ".last")},
    **{f"batch_norm{lies}.backward": _planes(5.0) for lies in ("", ".last")},
    "split_norm.forward": _planes(3.0),  # batch norm of a part of the batch, without the sending
    "split_norm.backward": _planes(5.0),
    "softmax.forward": _rows(2.0),
    "softmax.backward": _rows(3.0),
    "loss.forward": _rows(2.0),
    "loss.backward": _rows(4.0),
    "loss.across.forward": _rows(2.0),
    "loss.across.backward": _rows(4.0),
    "sum_rows": _rows(1.0),
    "sum_columns": _rows(1.0),
    "lookup.forward": _rows(2.0),
    "lookup.backward": Family(
        ("rows", "table", "columns"),
        lambda rows, table, columns: 0.0 * rows,
        _lookup_backward,
    ),
    **{name: _bytes() for name in (*PASSES, *POOLS)},
    **{name: _bytes() for name in RELATIONS if RELATIONS[name] in (*PASSES, *POOLS)},
    **{
        f"update.{each.name}": Family(
            ("items",), lambda n: 10.0 * n, lambda n, p=float(each.memory_passes): p * n
        )
        for each in OPTIMIZERS.values()
    },
}


FORMAT = "shardfold-profile"
VERSION = 1
DOCUMENT = Document(
    "profile", FORMAT, VERSION, ProfileError, "calibrate again", " Calibrate again."
)


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all parts of a profile: no field that this version does not know."""


class Machine(Entry, frozen=True):
    """The device: what PyTorch calls it, its kind, its multiprocessors or cores, its memory."""

    name: str
    kind: str  # cuda or cpu
    units: int
    memory_bytes: int
    processes: int = 1  # that were measured side by side, sharing the machine
    workspace_bytes: int = 0  # that matrix products keep for themselves


class Fit(Entry, frozen=True):
    """How far a table is off at sizes that are not in its grid: shares of the measured time."""

    probes: int
    median: float
    worst: float


class Table(Entry, frozen=True):
    """Seconds of a kernel family in one dtype, on a grid of sizes, the last varying fastest.

    A size too large for the machine or for the time given was not measured: None.
    """

    family: str
    dtype: str
    grid: tuple[tuple[float, ...], ...]
    seconds: tuple[float | None, ...]
    fit: Fit | None = None

    def __post_init__(self) -> None:
        from math import prod

        if len(self.seconds) != prod(len(axis) for axis in self.grid):
            raise ValueError(
                f"{self.family} has {len(self.seconds)} times for a grid of "
                f"{'x'.join(str(len(axis)) for axis in self.grid)}"
            )


class HostEntry(Entry, frozen=True):
    """What the host takes to launch one operator of a kind, forward and backward."""

    kind: str
    forward_seconds: float
    backward_seconds: float


class CollectiveEntry(Entry, frozen=True):
    """A collective by bytes, on groups of `size` of which `groups` communicate at once."""

    kind: str
    size: int
    groups: int
    bytes: tuple[float, ...]
    seconds: tuple[float, ...]


class Rates(Entry, frozen=True):
    """The best that was seen: operations of matrix products by dtype, and bytes, per second."""

    flops: dict[str, float]
    bandwidth: float


class Profile(Entry, frozen=True):
    """Everything that was measured of one machine."""

    format: str
    version: int
    machine: Machine
    environment: dict[str, str]
    rates: Rates
    tables: tuple[Table, ...]
    host: tuple[HostEntry, ...]
    collectives: tuple[CollectiveEntry, ...] = ()
    digest: str = ""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes in which matrix products were measured."""
        return tuple(self.rates.flops)

    def table(self, family: str, dtype: str) -> Table | None:
        """The table of a family in a dtype, if it was measured."""
        for table in self.tables:
            if table.family == family and table.dtype == dtype:
                return table
        return None

    def save(self, path: str | Path) -> None:
        """Write the profile; an existing file is replaced only by a complete one."""
        DOCUMENT.save(path, dumps(self))


def sealed(profile: Profile) -> Profile:
    """The profile as it will be read again, with the digest of its contents."""
    profile = msgspec.convert(msgspec.to_builtins(profile), Profile)
    return msgspec.structs.replace(profile, digest=_digest(profile))


def dumps(profile: Profile) -> str:
    """JSON with one table or collective a line."""
    plain = msgspec.to_builtins(profile)
    lines = []
    for key, value in plain.items():
        if isinstance(value, list) and value:
            rows = ",\n".join("    " + _compact(row) for row in value)
            lines.append(f'  "{key}": [\n{rows}\n  ]')
        else:
            lines.append(f'  "{key}": {_compact(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _compact(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def load(path: str | Path) -> Profile:
    """Read a profile, and check that it is whole and as it was written."""
    return loads(DOCUMENT.read(path), str(path))


def loads(data: bytes, source: str = "profile") -> Profile:
    """Parse a profile, and check its digest."""
    profile = DOCUMENT.decode(data, source, Profile)
    if profile.digest != _digest(profile):
        raise ProfileError(
            f"{source} is not as it was written: its contents do not match its digest. "
            "A profile is measured, not edited: calibrate again, or describe other hardware in a "
            "cluster file."
        )
    return profile


def _digest(profile: Profile) -> str:
    bare = msgspec.structs.replace(profile, digest="")
    return "sha256:" + hashlib.sha256(msgspec.json.encode(bare)).hexdigest()


Values = NDArray[np.float64]
BEYOND = 2.0  # times the grid's last size: further out, it is said


def least_seconds(family: str, dtype: str, sizes: Sequence[Any], rates: Rates) -> Values:
    """The longer of a family's arithmetic and traffic at the machine's best rates."""
    found = FAMILIES[family]
    rate = rates.flops.get(dtype) or max(rates.flops.values())
    moved = found.moved_bytes(ITEM_BYTES[dtype], sizes)
    seconds = np.asarray(moved / rates.bandwidth, dtype=np.float64)
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
