"""Calls of every view: merges, divisions, parts and joins."""

from __future__ import annotations

from . import parts
from .cases import case, normal
from .oracle import Case


def views() -> list[Case]:
    return _reshapes() + _orders() + _cuts() + _joins()


def _reshapes() -> list[Case]:
    size, shape = parts.sized("size"), parts.sized("shape")
    merge = {"self": normal(4, 3, 6), "size": [12, 6]}
    heads = {"self": normal(4, 3, 8), "size": [12, 2, 4]}
    across = {"self": normal(4, 6), "size": [8, 3]}
    unlike = {"self": normal(6, 4), "size": [4, 6]}
    return [
        case("view", merge, localise=size),
        case("view", heads, localise=size, label="heads"),
        case("view", across, localise=size, label="across"),
        case("view", unlike, localise=size, label="unlike"),
        case("view", {"self": normal(1, 4, 6), "size": [4, 1, 6]}, localise=size, label="ones"),
        case("_unsafe_view", heads, localise=size),
        case("reshape", {"self": normal(12, 8), "shape": [4, 3, 2, 4]}, localise=shape),
        case("flatten.using_ints", {"self": normal(4, 3, 6), "start_dim": 1}),
        case("ravel", {"self": normal(4, 3, 6)}),
        case(
            "unflatten.int",
            {"self": normal(4, 12), "dim": 1, "sizes": [3, 4]},
            localise=parts.unflatten_sizes,
        ),
        case("squeeze.dim", {"self": normal(4, 1, 6), "dim": 1}),
        case("unsqueeze", {"self": normal(4, 6), "dim": 1}),
        case("view_as", {"self": normal(4, 6), "other": normal(24)}, localise=_like),
        case("reshape_as", {"self": normal(4, 6), "other": normal(2, 12)}, localise=_like),
        case("detach", {"self": normal(4, 6)}),
        case("expand", {"self": normal(4, 1, 6), "size": [2, 4, 3, 6]}, localise=size),
        case("broadcast_to", {"self": normal(6), "size": [4, 6]}, localise=size),
        case("expand_as", {"self": normal(6), "other": normal(4, 6)}, localise=_like),
        case("repeat", {"self": normal(4, 6), "repeats": [2, 3, 1]}, localise=_fewer_repeats),
    ]


def _like(part: parts.Part, arguments: parts.Arguments) -> parts.Arguments:
    return {**arguments, "other": normal(*part.shape())}


def _fewer_repeats(part: parts.Part, arguments: parts.Arguments) -> parts.Arguments:
    repeats = list(arguments["repeats"])
    if part.factor.startswith("n"):
        repeats[int(part.factor[1:])] = part.high - part.low
    return {**arguments, "repeats": repeats}


def _orders() -> list[Case]:
    x = normal(4, 6, 3)
    return [
        case("permute", {"self": x, "dims": [2, 0, -2]}),
        case("transpose.int", {"self": x, "dim0": -1, "dim1": 1}),
        case("swapaxes", {"self": x, "axis0": 0, "axis1": 2}),
        case("swapdims", {"self": x, "dim0": 0, "dim1": 2}),
        case("t", {"self": normal(4, 6)}),
        case("numpy_T", {"self": normal(4, 6)}),
        case("matrix_H", {"self": normal(4, 6)}),
        *(case(name, {"self": x}) for name in ("mT", "mH", "adjoint")),
        case("moveaxis.int", {"self": x, "source": 0, "destination": -1}),
        case("movedim.int", {"self": x, "source": 0, "destination": -1}),
        case("movedim.intlist", {"self": x, "source": [0, 1], "destination": [2, 0]}, label="two"),
        case("flip", {"self": x, "dims": [1]}),
        case("roll", {"self": x, "shifts": [1], "dims": [-1]}),
        case("roll", {"self": x, "shifts": [1]}, label="flat"),
    ]


def _cuts() -> list[Case]:
    x, split = normal(4, 6, 3), parts.split_sizes
    return [
        case("slice.Tensor", {"self": x, "dim": 1, "start": 2, "end": 6}),
        case("slice.Tensor", {"self": normal(4, 8), "dim": 1, "start": 1, "step": 2}, label="odd"),
        case("narrow", {"self": x, "dim": -1, "start": 1, "length": 2}),
        case("diff", {"self": x, "dim": 1}),
        case("pad", {"self": x, "pad": [1, 0, 0, 0, 2, 1]}),
        case("constant_pad_nd", {"self": x, "pad": [0, 0, 1, 1]}),
        case("select.int", {"self": x, "dim": 1, "index": -1}),
        case("unbind.int", {"self": x, "dim": -1}),
        case("split.Tensor", {"self": x, "split_size": 3, "dim": 1}, localise=split),
        case("split.Tensor", {"self": x, "split_size": 4, "dim": 1}, label="unequal"),
        case("split_with_sizes", {"self": x, "split_sizes": [2, 2, 2], "dim": 1}, localise=split),
        case("chunk", {"self": x, "chunks": 2, "dim": 1}),
        case("tensor_split.sections", {"self": x, "sections": 2, "dim": 1}),
    ]


def _joins() -> list[Case]:
    equal = {"tensors": [normal(4, 6), normal(4, 6)], "dim": 1}
    unequal = {"tensors": [normal(4, 6), normal(4, 2)], "dim": 1}
    return [
        case("cat", equal),
        case("cat", unequal, label="unequal"),
        case("cat", {**equal, "dim": -2}, label="rows"),
        case("concat", equal),
        case("slice_scatter", {"self": normal(4, 6), "src": normal(4, 3), "dim": 1, "start": 3}),
        case("stack", equal),
    ]
