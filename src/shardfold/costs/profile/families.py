"""Kernel families: what a device is measured on, and what a family's sizes ask of it at least.

A family is a kind of kernel whose time depends on a few sizes: a product of m x k and k x n, a sum
over the rows of a matrix, a pass over so many bytes. Its arithmetic and its traffic give the least
time that any device could take; what a device is measured to take beyond that varies slowly with
the sizes, so it can be interpolated between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardfold.operators.convolution import WINDOWS
from shardfold.operators.matrix import PARITIES

Sizes = tuple[Any, ...]  # one number or array for each name


@dataclass(frozen=True, slots=True)
class Family:
    """The sizes of a kind of kernel by name, its operations, and the items that it moves."""

    sizes: tuple[str, ...]
    flops: Callable[..., Any]
    items: Callable[..., Any]
    engine: str = "vector"


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
UPDATES = ("sgd", "momentum", "adam", "adamw")
PASSES = ("vector", "cast", "strided", "fill", "max_pool.forward", "max_pool.backward")
POOLS = ("avg_pool.forward", "avg_pool.backward")

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
        f"conv.{name}.{phase}": _conv(kernel[0] * kernel[1], stride, times)
        for name, (kernel, stride) in WINDOWS.items()
        for phase, times in (("forward", 1.0), ("backward", 2.0))
    },
    "layer_norm.forward": _rows(2.0),
    "layer_norm.backward": _rows(5.0),
    "batch_norm.forward": _planes(3.0),
    "batch_norm.backward": _planes(5.0),
    "split_norm.forward": _planes(3.0),  # batch norm of a part of the batch, without the sending
    "split_norm.backward": _planes(5.0),
    "softmax.forward": _rows(2.0),
    "softmax.backward": _rows(3.0),
    "loss.forward": _rows(2.0),
    "loss.backward": _rows(4.0),
    "sum_rows": _rows(1.0),
    "sum_columns": _rows(1.0),
    "lookup.forward": _rows(2.0),
    "lookup.backward": Family(
        ("rows", "table", "columns"),
        lambda rows, table, columns: 0.0 * rows,
        _lookup_backward,
    ),
    **{name: _bytes() for name in (*PASSES, *POOLS)},
    **{
        f"update.{name}": Family(("items",), lambda n: 10.0 * n, lambda n, p=passes: p * n)
        for name, passes in zip(UPDATES, (3.0, 5.0, 7.0, 7.0), strict=True)
    },
}
