"""What a part of a call must be told beside its operands: local sizes, local rows of a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .oracle import Arguments, Finish, Part

Localiser = Callable[[Part, Arguments], Any]


def sized(name: str, last: int | None = None) -> Localiser:
    """The argument `name` is the shape of the result (or its last dims)."""

    def localise(part: Part, arguments: Arguments) -> Arguments:
        shape = part.shape()
        return {**arguments, name: shape if last is None else shape[-last:]}

    return localise


def counted(name: str, factor: str) -> Localiser:
    """The argument `name` is a factor's size."""

    def localise(part: Part, arguments: Arguments) -> Arguments:
        return {**arguments, name: part.high - part.low} if part.factor == factor else arguments

    return localise


def group_norm_sizes(part: Part, arguments: Arguments) -> Arguments:
    batch, channels, *_ = arguments["input"].shape
    local = {**arguments, "N": batch, "C": channels}
    return {**local, "group": part.high - part.low} if part.factor == "g" else local


def split_sizes(part: Part, arguments: Arguments) -> Arguments:
    name = "split_size" if "split_size" in arguments else "split_sizes"
    dim = arguments["dim"]
    lengths = [part.shape(k)[dim] for k in range(len(part.call.results))]
    return {**arguments, name: lengths[0] if name == "split_size" else lengths}


def unflatten_sizes(part: Part, arguments: Arguments) -> Arguments:
    dim, count = arguments["dim"], len(arguments["sizes"])
    return {**arguments, "sizes": part.shape()[dim : dim + count]}


def bag_rows(part: Part, arguments: Arguments) -> tuple[Arguments, Finish] | Arguments:
    """A part of a table's rows: the others count as nothing in their bags."""
    if part.factor != "v":
        return arguments
    index = arguments["indices"]
    mine = (index >= part.low) & (index < part.high)
    rows = (index - part.low).clamp(0, part.high - part.low - 1)
    length = index.shape[1] if arguments["mode"] == 1 else 1
    local = {**arguments, "indices": rows, "per_sample_weights": mine.double(), "mode": 0}
    return local, lambda results: [result / length for result in results]


def rows_of(table: str, index: str, factor: str, dim: int, *, writes: bool = False) -> Localiser:
    """A part of a table's rows: what lies outside goes to (or comes from) one more row of zeros."""

    def localise(part: Part, arguments: Arguments) -> tuple[Arguments, Finish] | Arguments:
        if part.factor != factor:
            return arguments
        local = dict(arguments)
        rows = local[table]
        zeros = torch.zeros_like(rows.narrow(dim, 0, 1))
        local[table] = torch.cat([rows, zeros], dim)
        if index.endswith("]"):
            name, _, at = index[:-1].partition("[")
            local[name] = list(local[name])
            local[name][int(at)] = _moved(local[name][int(at)], part)
        else:
            local[index] = _moved(local[index], part)
        count = part.high - part.low
        return local, (lambda rs: [r.narrow(dim, 0, count) for r in rs] if writes else rs)

    return localise


def _moved(index: Tensor, part: Part) -> Tensor:
    inside = (index >= part.low) & (index < part.high)
    return torch.where(inside, index - part.low, part.high - part.low)
