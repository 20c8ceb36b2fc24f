"""Dims followed back through views, copies and broadcasts: where each element came from.

A dim is a list of pieces, major first. A piece is a part of a coordinate of what is asked about:
its name, how far apart its steps are, and how many there are. A reshape regroups pieces or cuts
them, a broadcast drops them.

    of [e, t m]:  a view of [(e t), m], of 4 experts' copies of [t, m] by `repeat(4, 1)`
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

ATEN = torch.ops.aten
Piece = tuple[str, int, int]  # (coordinate // apart) % size
Dim = tuple[Piece, ...]
Dims = tuple[Dim, ...]

VIEWS = {ATEN.view.default, ATEN.reshape.default, ATEN._unsafe_view.default}
REGROUPED = {
    *VIEWS,
    *(ATEN.unsqueeze.default, ATEN.flatten.using_ints, ATEN.unflatten.int),
    *(ATEN.squeeze.default, ATEN.squeeze.dim, ATEN.squeeze.dims),
    *(ATEN.contiguous.default, ATEN.clone.default),
}
SWAPPED = {ATEN.transpose.int, ATEN.permute.default, ATEN.t.default}


def shape_of(node: Any) -> tuple[int, ...]:
    """The shape of the tensor that a node stands for."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def named(names: Sequence[str], shape: Sequence[int]) -> Dims:
    """Dims of these names; those of one name are one coordinate, row-major."""
    found: list[Dim] = []
    apart: dict[str, int] = {}
    for name, size in reversed(list(zip(names, shape, strict=True))):
        found.insert(0, ((name, apart.get(name, 1), size),) if size > 1 else ())
        apart[name] = apart.get(name, 1) * size
    return tuple(found)


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours that are one range of one coordinate are one piece."""
    found: list[Piece] = []
    for name, apart, size in pieces:
        whole = size
        if found and found[-1][:2] == (name, apart * size):
            whole *= found.pop()[2]
        found.append((name, apart, whole))
    return found


def followed(node: fx.Node, dims: Dims) -> Dims | None:
    """The dims of what a node views, copies or repeats."""
    shape = shape_of(node.args[0]) if node.args else ()
    if node.target in REGROUPED:
        return _regrouped(dims, shape)
    if node.target in SWAPPED:
        return _swapped(node, dims)
    if node.target is ATEN.expand.default:
        return dims[len(dims) - len(shape) :]
    return _unrepeated(dims, shape) if node.target is ATEN.repeat.default else None


def _regrouped(dims: Dims, shape: Sequence[int]) -> Dims | None:
    """The same elements in the same order, as dims of other sizes."""
    rest = joined(piece for dim in dims for piece in dim)
    found: list[Dim] = []
    for size in reversed(shape):
        dim: list[Piece] = []
        left = size
        while left > 1:
            if not rest:
                return None
            name, apart, count = rest.pop()
            taken = math.gcd(left, count)
            if taken < min(left, count):
                return None
            dim.insert(0, (name, apart, taken))
            if taken < count:
                rest.append((name, apart * taken, count // taken))
            left //= taken
        found.insert(0, tuple(dim))
    return None if rest else tuple(found)


def _swapped(node: fx.Node, dims: Dims) -> Dims:
    order = list(range(len(dims)))
    if node.target is ATEN.permute.default:
        order = [int(d) % len(dims) for d in node.args[1]]
    else:
        given = node.args[1:3] if node.target is ATEN.transpose.int else (0, -1)
        a, b = (int(d) % len(dims) for d in given)
        order[a], order[b] = b, a
    found: list[Dim] = [()] * len(dims)
    for to, came in enumerate(order):
        found[came] = dims[to]
    return tuple(found)


def _unrepeated(dims: Dims, shape: Sequence[int]) -> Dims | None:
    """Of each dim the minor pieces, as many as there were before it was repeated."""
    found: list[Dim] = []
    for dim, size in zip(dims[len(dims) - len(shape) :], shape, strict=True):
        total = math.prod(count for _, _, count in dim)
        parts = None if total % size else _regrouped((dim,), (total // size, size))
        if parts is None:
            return None
        found.append(parts[1])
    return tuple(found)
