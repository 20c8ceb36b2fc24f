"""Views and rearrangements: which part of the input each part of the output is.

A reshape is read as groups of dims with equal products; within a group the common refinement
gives the factors: `(8, 512, 768) -> (4096, 12, 64)` is `a b (c d) -> (a b) c d`. Dims that are
cut, joined or shifted at unequal places are undescribed, and so never split there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from shardfold.operators.kernels import Kernel, LocalWork, broadcast_sum, copied, memory_pass
from shardfold.operators.notation import Call, Dim, Rule
from shardfold.operators.operator import UNKNOWN, Operator, aten, keeps_means


def _rule(
    call: Call,
    operands: Sequence[Sequence[Dim]],
    results: Sequence[Sequence[Dim]],
    sizes: dict[str, int],
    **properties: Any,
) -> Rule:
    """A rule of pure movement: no arithmetic, and every operand may be partial."""
    properties.setdefault("engine", "none")
    floating = all(kind.is_floating for kind in (*call.inputs, *call.results))
    return Rule(
        tuple(tuple(dims) for dims in operands),
        tuple(tuple(dims) for dims in results),
        sizes,
        flops=0.0,
        linear=tuple(range(len(operands))) if floating else (),
        backward=1.0,
        **properties,
    )


def _own(shape: Sequence[int]) -> tuple[list[Dim], dict[str, int]]:
    """Each dim its own factor; a dim of size 1 needs none."""
    dims: list[Dim] = [(f"i{k}",) if size > 1 else () for k, size in enumerate(shape)]
    return dims, {f"i{k}": size for k, size in enumerate(shape) if size > 1}


def _groups(a: Sequence[int], b: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Runs of dims of `a` and of `b` with equal products, as dim positions."""
    i = j = 0
    while i < len(a) or j < len(b):
        left, right = [i] if i < len(a) else [], [j] if j < len(b) else []
        i, j = i + len(left), j + len(right)
        while math.prod(a[k] for k in left) != math.prod(b[k] for k in right):
            if math.prod(a[k] for k in left) < math.prod(b[k] for k in right):
                left.append(i)
                i += 1
            else:
                right.append(j)
                j += 1
        yield left, right


def _cuts(sizes: Sequence[int]) -> set[int]:
    products = [math.prod(sizes[k:]) for k in range(1, len(sizes))]
    return {p for p in products if 1 < p < math.prod(sizes)}


def _refine(a: Sequence[int], b: Sequence[int]) -> list[int] | None:
    """The common refinement of two factorisations of one number, or None."""
    total = math.prod(a)
    bounds = [1, *sorted(_cuts(a) | _cuts(b)), total]
    if any(y % x for x, y in pairwise(bounds)):
        return None
    return [y // x for x, y in pairwise(bounds)][::-1]


def _deal(names: list[str], sizes: dict[str, int], shape: Sequence[int]) -> list[Dim]:
    """Give consecutive factors to dims until each dim's size is reached."""
    dims: list[Dim] = []
    rest = list(names)
    for size in shape:
        taken: list[str] = []
        while math.prod(sizes[f] for f in taken) < size:
            taken.append(rest.pop(0))
        dims.append(tuple(taken))
    return dims


def _reshape(call: Call) -> Rule:
    """view, reshape, flatten, unflatten, squeeze, unsqueeze: same elements, same order."""
    before, after = call.inputs[0].shape, call.results[0].shape
    left: list[Dim] = [()] * len(before)
    right: list[Dim] = [()] * len(after)
    sizes: dict[str, int] = {}
    for number, (ours, theirs) in enumerate(_groups(before, after)):
        a, b = [before[k] for k in ours], [after[k] for k in theirs]
        pieces = _refine(a, b)
        if pieces is None or math.prod(a) == 1:
            continue
        names = [f"v{number}_{k}" if len(pieces) > 1 else f"v{number}" for k in range(len(pieces))]
        sizes |= dict(zip(names, pieces, strict=True))
        for k, dim in zip(ours, _deal(names, sizes, a), strict=True):
            left[k] = dim
        for k, dim in zip(theirs, _deal(names, sizes, b), strict=True):
            right[k] = dim
    others: list[list[Dim]] = [[()] * len(kind.shape) for kind in call.inputs[1:]]
    return _rule(call, [left, *others], [right], sizes)


def _permute(call: Call) -> list[int]:
    """For each dim of the result, the operand's; likewise below."""
    rank = len(call.inputs[0].shape)
    return [k % rank for k in call.attribute("dims")]


def _transpose(call: Call) -> list[int]:
    rank = len(call.inputs[0].shape)
    order = list(range(rank))
    names = ("axis0", "axis1") if call.op.kind == "aten.swapaxes" else ("dim0", "dim1")
    if rank > 1:
        i, j = (call.attribute(name, k) % rank for k, name in enumerate(names))
        order[i], order[j] = order[j], order[i]
    return order


def _movedim(call: Call) -> list[int]:
    rank = len(call.inputs[0].shape)
    source, target = (
        [k % max(rank, 1) for k in (v if isinstance(v, tuple) else (v,))]
        for v in (call.attribute("source"), call.attribute("destination"))
    )
    moved = dict(zip(target, source, strict=True))
    rest = iter(k for k in range(rank) if k not in source)
    return [moved[k] if k in moved else next(rest) for k in range(rank)]


def _last_two(call: Call) -> list[int]:
    *first, i, j = range(len(call.inputs[0].shape))
    return [*first, j, i]


def _reversed(call: Call) -> list[int]:
    return list(range(len(call.inputs[0].shape)))[::-1]


def _permuting(order: Callable[[Call], list[int]]) -> Operator:
    """A view with its dims in another order."""

    def rule(call: Call) -> Rule:
        dims, sizes = _own(call.inputs[0].shape)
        return _rule(call, [dims], [[dims[k] for k in order(call)]], sizes)

    return replace(VIEW, rule=rule, local="same call", memory="permuted", permutes=order)


def _expand(call: Call) -> Rule:
    """New and widened dims are factors of the result alone."""
    shape = call.results[0].shape
    after, sizes = _own(shape)
    operands = []
    for kind in call.inputs:
        offset = len(shape) - len(kind.shape)
        same = [n > 1 and n == shape[k + offset] for k, n in enumerate(kind.shape)]
        operands.append([after[k + offset] if keep else () for k, keep in enumerate(same)])
    return _rule(call, operands[:1] + [[()] * len(o) for o in operands[1:]], [after], sizes)


def _changed(call: Call, *dims: int, engine: str = "none") -> Rule:
    """The given dims are cut or shifted; all others run through."""
    rank = len(call.inputs[0].shape)
    own, sizes = _own(call.inputs[0].shape)
    lost = {k % rank for k in dims}
    kept: list[Dim] = [() if k in lost else dim for k, dim in enumerate(own)]
    return _rule(call, [kept] * len(call.inputs), [kept] * len(call.results), sizes, engine=engine)


def _along(call: Call) -> Rule:
    return _changed(call, call.attribute("dim", 0))


def _written_along(call: Call) -> Rule:
    """A copy of one tensor with a range of another's elements; that dim stays whole."""
    return _changed(call, call.attribute("dim", 0), engine="vector")


def _slice(call: Call) -> Rule:
    """Every n-th of all is `(i n) -> i`; else the dim that is cut stays whole."""
    dim, step = call.attribute("dim", 0), call.attribute("step", 1)
    rule = _changed(call, dim)
    shape, after = call.inputs[0].shape, call.results[0].shape
    dim %= len(shape)
    if step == 1 or shape[dim] != step * after[dim] or after[dim] == 1:
        return rule
    before, result = list(rule.operands[0]), list(rule.results[0])
    before[dim], result[dim] = (f"i{dim}", "n"), (f"i{dim}",)
    sizes = {**rule.sizes, f"i{dim}": after[dim], "n": step}
    return replace(
        rule,
        operands=(tuple(before),),
        results=(tuple(result),),
        sizes=sizes,
        whole=frozenset({"n"}),
    )


def _flip(call: Call) -> Rule:
    dims = call.attribute("dims", ()) or range(len(call.inputs[0].shape))
    return _changed(call, *dims, engine="vector")


def _pad(call: Call) -> Rule:
    """Only the dims that are padded are touched; the list runs from the last dim back."""
    widths = call.attribute("pad")
    rank = len(call.inputs[0].shape)
    dims = [rank - 1 - k for k in range(len(widths) // 2) if any(widths[2 * k : 2 * k + 2])]
    rule = _changed(call, *dims, engine="vector")
    if call.attribute("mode", "constant") in ("reflect", "replicate"):
        rule = replace(rule, saves=(0,))  # for its size alone
    # A pad with a value is no sum of what is padded in parts.
    return replace(rule, linear=()) if call.attribute("value", 0.0) else rule


def _select(call: Call) -> Rule:
    """One slice of a dim: that dim is gone."""
    rank = len(call.inputs[0].shape)
    dims, sizes = _own(call.inputs[0].shape)
    gone = call.attribute("dim", 0) % rank
    dims[gone] = ()
    rest = [dim for k, dim in enumerate(dims) if k != gone]
    return _rule(call, [dims], [rest] * len(call.results), sizes)


def _parts(call: Call) -> Rule:
    """split, chunk: equal parts are `(g n) -> n`, so a split of n runs through all of them."""
    rank = len(call.inputs[0].shape)
    dim = call.attribute("dim", 0) % rank
    lengths = {kind.shape[dim] for kind in call.results}
    total = call.inputs[0].shape[dim]
    parts = total // min(lengths)
    if len(lengths) > 1 or parts == 1 or min(lengths) == 1:
        return _changed(call, dim)
    before, sizes = _own(call.inputs[0].shape)
    after = list(before)
    sizes |= {"g": parts, "n": min(lengths)}
    before[dim], after[dim] = ("g", "n"), ("n",)
    sizes.pop(f"i{dim}", None)
    whole = frozenset({"g"})
    return _rule(call, [before], [after] * len(call.results), sizes, whole=whole)


def _cat(call: Call) -> Rule:
    """Equal parts joined are `n, n -> (g n)`; unequal ones leave that dim whole."""
    rank = len(call.results[0].shape)
    dim = call.attribute("dim", 0) % rank
    lengths = {kind.shape[dim] for kind in call.inputs if len(kind.shape) == rank}
    if any(len(kind.shape) != rank for kind in call.inputs):
        return call.undescribed(engine="vector", flops=0.0)
    if len(lengths) > 1 or len(call.inputs) == 1 or min(lengths) == 1:
        return _changed(call, dim, engine="vector")
    own, sizes = _own(call.results[0].shape)
    before, after = list(own), list(own)
    sizes.pop(f"i{dim}")
    sizes |= {"g": len(call.inputs), "n": min(lengths)}
    before[dim], after[dim] = ("n",), ("g", "n")
    return _rule(
        call,
        [before] * len(call.inputs),
        [after],
        sizes,
        whole=frozenset({"g"}),
        engine="vector",
    )


def _stack(call: Call) -> Rule:
    """A new dim, whole."""
    dims, sizes = _own(call.inputs[0].shape)
    at = call.attribute("dim", 0) % len(call.results[0].shape)
    after = [*dims[:at], (), *dims[at:]]
    return _rule(call, [dims] * len(call.inputs), [after], sizes, engine="vector")


def _repeat(call: Call) -> Rule:
    """A dim repeated n times is `i -> (n i)`."""
    repeats = call.attribute("repeats")
    before, sizes = _own(call.inputs[0].shape)
    offset = len(repeats) - len(before)
    after: list[Dim] = []
    for k, count in enumerate(repeats):
        own = before[k - offset] if k >= offset else ()
        new: Dim = (f"n{k}",) if count > 1 else ()
        sizes |= {f"n{k}": count} if count > 1 else {}
        after.append(new + own)
    return _rule(call, [before], [after], sizes, engine="vector")


def _sliced(work: LocalWork, phase: str) -> list[Kernel]:
    """Backward, zeros of the whole, and a copy of the gradient into them."""
    if phase != "backward":
        return []
    fill = memory_pass(work.operand_bytes(0), work.dtype, "fill")
    return [fill, memory_pass(2.0 * work.result_bytes(0), work.dtype, "strided")]


def _pieces(work: LocalWork, phase: str) -> list[Kernel]:
    """Backward, the gradients of all pieces are put together; what has gaps, slowly."""
    if phase != "backward":
        return []
    family = "cat" if work.access.is_gradient_strided else "vector"
    return [memory_pass(2.0 * work.operand_bytes(0), work.dtype, family)]


def _joined(work: LocalWork, phase: str) -> list[Kernel]:
    """What has gaps is joined slowly; backward, the pieces are views of the gradient."""
    if phase == "backward":
        return []
    family = "cat" if work.access.is_strided else "vector"
    return [memory_pass(2.0 * work.result_bytes(0), work.dtype, family)]


def _overwritten(work: LocalWork, phase: str) -> list[Kernel]:
    """A copy of the whole, and a part written into it; backward, a copy with zeros there."""
    whole, part = 2.0 * work.result_bytes(0), work.operand_bytes(1)
    if phase != "backward":
        return [memory_pass(whole, work.dtype), memory_pass(2.0 * part, work.dtype, "strided")]
    if 0 not in work.trained:
        return []
    return [memory_pass(whole, work.dtype), memory_pass(part, work.dtype, "fill")]


def _expanded(work: LocalWork, phase: str) -> list[Kernel]:
    return broadcast_sum(work, 0) if phase == "backward" else []


VIEW = Operator(
    _reshape,
    "own form",
    kernels=copied,
    launched_as="aten.view",
    memory="view",
    keeps_means=keeps_means,
)
RESHAPE = replace(VIEW, memory="copy if needed")
BROADCAST = replace(
    VIEW,
    rule=_expand,
    kernels=_expanded,
    launched_as="aten.transpose",
    memory="broadcast",
    fills=True,
)
SLICE = Operator(_along, kernels=_sliced, memory="cut", keeps_means=keeps_means)
PIECES = Operator(
    _parts,
    "own form",
    kernels=_pieces,
    launched_as="aten.cat",
    memory="cut",
    keeps_means=keeps_means,
)
MOVED = Operator(_flip, keeps_means=keeps_means)  # elements in other places, or beside others

TABLE: Mapping[str, Operator] = {
    **aten("unflatten squeeze unsqueeze view_as _unsafe_view", VIEW),
    "aten.view": replace(VIEW, left_out="same shape"),
    "aten.detach": replace(VIEW, local="same call", stops_gradient=True),
    **aten("reshape flatten ravel", replace(RESHAPE, left_out="same shape")),
    "aten.reshape_as": RESHAPE,
    "aten.permute": _permuting(_permute),
    **aten("transpose swapaxes swapdims t", _permuting(_transpose)),
    **aten("movedim moveaxis", _permuting(_movedim)),
    **aten("mT mH adjoint", _permuting(_last_two)),
    **aten("numpy_T matrix_H", _permuting(_reversed)),
    "aten.expand": replace(BROADCAST, left_out="same shape"),
    **aten("expand_as broadcast_to", BROADCAST),
    "aten.slice": replace(SLICE, rule=_slice, left_out="same shape"),
    "aten.narrow": SLICE,
    "aten.select": replace(SLICE, rule=_select),
    **aten("split split_with_sizes chunk tensor_split", PIECES),
    "aten.unbind": replace(PIECES, rule=_select, local="same call"),
    "aten.diff": Operator(_along),
    **aten("roll flip", MOVED),
    **aten("pad constant_pad_nd", Operator(_pad, "own form")),
    **aten("cat concat", replace(MOVED, rule=_cat, kernels=_joined, memory="joined")),
    "aten.slice_scatter": replace(
        MOVED, rule=_written_along, kernels=_overwritten, local="own form"
    ),
    "aten.select_scatter": replace(UNKNOWN, local="own form"),  # its rule is found by experiment
    "aten.stack": replace(MOVED, rule=_stack, kernels=_joined, memory="joined"),
    "aten.repeat": Operator(_repeat, "own form", fills=True),
    # Capture leaves out what only names a tensor anew.
    **aten(
        "alias lift lift_fresh lift_fresh_copy",
        Operator(memory="view", keeps_means=keeps_means, left_out="always"),
    ),
    # An experiment finds their splits.
    **aten("view_as_complex view_as_real", replace(VIEW, rule=None, local="same call")),
    **aten("real imag", replace(SLICE, rule=None)),
    **aten("diagonal unfold", Operator(memory="cut")),
}
