"""Causal masks: drop a mask that is provably causal, and use the fused kernels instead.

Index and mask tensors are followed in closed form, without computing any element.

A tensor of positions is `constant + sum of coefficient * index` over its dims; a mask is the set
of such sums that must not exceed zero. Whatever is built from `arange`, comparisons and `and`
stays of these two forms, so a mask of 8,192 by 8,192 is known for the price of a few numbers.
What has another form is left out, and nothing is concluded about it.

A library that cannot rule out other shapes builds the mask of causal attention element by element
when it is exported, and copies shared heads beside it. The shapes of a plan are fixed, so where
the mask is proven to be causal, or to hide nothing, the operator says so itself: the fused kernels
skip half of the work, and keys and values stay as few as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardfold.capture.program import Invocation
from shardfold.graph import Op, Operand, Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Positions:
    """`constant + sum(coefficients[d] * index[d])` for a tensor of integers."""

    coefficients: tuple[int, ...]
    constant: int

    @property
    def is_constant(self) -> bool:
        """Whether all elements are the same."""
        return not any(self.coefficients)

    def plus(self, other: Positions, times: int = 1) -> Positions:
        """The sum with `times` the other, their dims aligned from the right."""
        dims = max(len(self.coefficients), len(other.coefficients))
        mine, theirs = _aligned(self.coefficients, dims), _aligned(other.coefficients, dims)
        total = tuple(a + times * b for a, b in zip(mine, theirs, strict=True))
        return Positions(total, self.constant + times * other.constant)

    def largest(self, shape: Shape) -> int:
        """The largest element of a tensor of this shape."""
        ends = zip(self.coefficients, shape[len(shape) - len(self.coefficients) :], strict=True)
        return self.constant + sum(max(0, c * (size - 1)) for c, size in ends)


@dataclass(frozen=True, slots=True)
class Mask:
    """True where none of these exceeds zero."""

    bounds: frozenset[Positions]

    def binding(self, shape: Shape) -> list[Positions]:
        """The bounds that some element of this shape exceeds."""
        return [bound for bound in self.bounds if bound.largest(shape) > 0]


@dataclass(frozen=True, slots=True)
class Added:
    """A mask of floats that is added to scores: zero where it is true, minus infinity elsewhere."""

    mask: Mask


TRUE = Mask(frozenset())
FALSE = Mask(frozenset({Positions((), 1)}))
Form = Positions | Mask | Added
Operands = Mapping[str, Form]


def forms_of(tensors: Sequence[Tensor], ops: Sequence[Op]) -> dict[int, Form]:
    """The closed form of every tensor that has one and that operators alone make."""
    found: dict[int, Form] = {}
    for op in ops:
        reader = READERS.get(op.kind)
        if reader is None or len(op.results) != 1:
            continue
        operands = {o.name: found[o.tensor] for o in op.operands if o.tensor in found}
        shapes = {o.name: tensors[o.tensor].type.shape for o in op.operands}
        result = tensors[op.results[0]].type
        is_made = len(operands) == len(op.operands) or op.kind in CONSTANTS
        is_known = result.dtype.startswith(("bool", "int"))
        if not is_made or not (is_known or op.kind in ADDED):
            continue
        form = reader(_Call(op.attributes, operands, shapes, result.shape, result.dtype))
        if form is not None:
            found[op.results[0]] = form
    return found


@dataclass(frozen=True, slots=True)
class _Call:
    attributes: Mapping[str, Any]
    operands: Operands
    shapes: Mapping[str, Shape]
    shape: Shape
    dtype: str

    def positions(self, name: str) -> Positions | None:
        """An operand, or a number, that is in the form of positions."""
        given = self.operands.get(name, self.attributes.get(name))
        if isinstance(given, int) and not isinstance(given, bool):
            return Positions((), given)
        return given if isinstance(given, Positions) else None

    def dim(self, of: str = "self") -> int:
        """The dim that the call names, counted from the left."""
        dims = len(self.shapes[of])
        return int(self.attributes["dim"]) % dims if dims else 0


def _arange(call: _Call) -> Form | None:
    start, step = call.attributes.get("start", 0), call.attributes.get("step", 1)
    if not (isinstance(start, int) and isinstance(step, int)):
        return None
    return Positions((step if call.shape[0] > 1 else 0,), start)


def _filled(value: int) -> Callable[[_Call], Form | None]:
    def made(call: _Call) -> Form | None:
        if call.dtype == "bool":
            return TRUE if value else FALSE
        return Positions((), value)

    return made


def _full(call: _Call) -> Form | None:
    value = call.attributes.get("fill_value")
    if "float" in call.dtype:
        return Added(FALSE) if value == -math.inf else None
    return _filled(int(value))(call) if isinstance(value, int) else None


def _sum(sign: int) -> Callable[[_Call], Form | None]:
    def made(call: _Call) -> Form | None:
        left, right = call.positions("self"), call.positions("other")
        alpha = call.attributes.get("alpha", 1)
        if left is None or right is None or not isinstance(alpha, int):
            return None
        return left.plus(right, sign * alpha)

    return made


def _compared(*bounds: tuple[int, int]) -> Callable[[_Call], Form | None]:
    """True where `sign * (self - other) + offset <= 0` for every (sign, offset)."""

    def made(call: _Call) -> Form | None:
        left, right = call.positions("self"), call.positions("other")
        if left is None or right is None:
            return None
        apart = left.plus(right, -1)
        if apart.is_constant:
            return TRUE if all(s * apart.constant + o <= 0 for s, o in bounds) else FALSE
        zero = Positions((), 0)
        return Mask(frozenset(Positions((), o).plus(zero.plus(apart, s)) for s, o in bounds))

    return made


def _differs(call: _Call) -> Form | None:
    left, right = call.positions("self"), call.positions("other")
    if left is None or right is None or not left.plus(right, -1).is_constant:
        return None
    return FALSE if left.plus(right, -1).constant == 0 else TRUE


def _both(call: _Call) -> Form | None:
    left, right = call.operands.get("self"), call.operands.get("other")
    if isinstance(left, Mask) and isinstance(right, Mask):
        return Mask(left.bounds | right.bounds)
    return None


def _reindexed(
    change: Callable[[_Call, list[int], int], tuple[list[int], int]],
) -> Callable[[_Call], Form | None]:
    """A view: the same change of coefficients for positions and for every bound of a mask."""

    def of(call: _Call, positions: Positions) -> Positions:
        whole = _aligned(positions.coefficients, len(call.shapes["self"]))
        coefficients, constant = change(call, list(whole), positions.constant)
        return Positions(tuple(coefficients), constant)

    def made(call: _Call) -> Form | None:
        form = call.operands.get("self")
        if isinstance(form, Mask):
            return Mask(frozenset(of(call, bound) for bound in form.bounds))
        return of(call, form) if isinstance(form, Positions) else None

    return made


def _unsqueeze(call: _Call, coefficients: list[int], constant: int) -> tuple[list[int], int]:
    coefficients.insert(int(call.attributes["dim"]) % (len(coefficients) + 1), 0)
    return coefficients, constant


def _expand(call: _Call, coefficients: list[int], constant: int) -> tuple[list[int], int]:
    return [*(0 for _ in range(len(call.shape) - len(coefficients))), *coefficients], constant


def _slice(call: _Call, coefficients: list[int], constant: int) -> tuple[list[int], int]:
    dim, start = call.dim(), call.attributes.get("start") or 0
    size, step = call.shapes["self"][dim], int(call.attributes.get("step", 1))
    start = min(max(start + size if start < 0 else start, 0), size)
    constant += coefficients[dim] * start
    coefficients[dim] = coefficients[dim] * step if call.shape[dim] > 1 else 0
    return coefficients, constant


def _cast(call: _Call) -> Form | None:
    form = call.operands.get("self")
    if isinstance(form, Added) or "float" in call.dtype:
        return form if isinstance(form, Added) and "float" in call.dtype else None
    fits = isinstance(form, Mask) == (call.dtype == "bool")
    return form if fits else None


def _difference(call: _Call) -> Form | None:
    """`diff` of positions along a dim, where what is put in front continues them."""
    form, front = call.operands.get("self"), call.operands.get("prepend")
    is_plain = call.attributes.get("n", 1) == 1 and call.attributes.get("append") is None
    if not (is_plain and isinstance(form, Positions)) or "append" in call.shapes:
        return None
    dim = call.dim()
    whole = _aligned(form.coefficients, len(call.shapes["self"]))
    if "prepend" in call.shapes:
        if not isinstance(front, Positions) or call.shapes["prepend"][dim] != 1:
            return None
        first = Positions((*whole[:dim], 0, *whole[dim + 1 :]), form.constant)
        step = first.plus(front, -1)
        if not step.is_constant or (step.constant != whole[dim] and call.shape[dim] > 1):
            return None
        return Positions((), step.constant)
    return Positions((), whole[dim])


def _running_sum(call: _Call) -> Form | None:
    """Of nothing but zeros."""
    form = call.operands.get("self")
    is_zero = form == Positions((), 0) or (
        isinstance(form, Mask) and any(b.is_constant and b.constant > 0 for b in form.bounds)
    )
    return Positions((), 0) if is_zero else None


def _picked(call: _Call) -> Form | None:
    """Any elements of a tensor whose elements are all the same."""
    form = call.operands.get("self")
    return form if isinstance(form, Positions) and form.is_constant else None


def _triangle(call: _Call) -> Form | None:
    form = call.operands.get("self")
    if not isinstance(form, Mask):
        return None
    bound = Positions((-1, 1), -int(call.attributes.get("diagonal", 0)))
    return Mask(form.bounds | {bound})


def _upper_triangle(call: _Call) -> Form | None:
    """Minus infinity from a diagonal on, zero before it."""
    if call.operands.get("self") != Added(FALSE):
        return None
    return Added(Mask(frozenset({Positions((-1, 1), 1 - int(call.attributes["diagonal"]))})))


def _aligned(coefficients: tuple[int, ...], dims: int) -> tuple[int, ...]:
    return (0,) * (dims - len(coefficients)) + coefficients


CONSTANTS = {"aten.new_ones", "aten.new_zeros", "aten.ones_like", "aten.zeros_like"}
READERS: Mapping[str, Callable[[_Call], Form | None]] = {
    "aten.arange": _arange,
    "aten.ones": _filled(1),
    "aten.zeros": _filled(0),
    "aten.full": _full,
    "aten.new_ones": _filled(1),
    "aten.new_zeros": _filled(0),
    "aten.ones_like": _filled(1),
    "aten.zeros_like": _filled(0),
    "aten.add": _sum(1),
    "aten.sub": _sum(-1),
    "aten.le": _compared((1, 0)),
    "aten.lt": _compared((1, 1)),
    "aten.ge": _compared((-1, 0)),
    "aten.gt": _compared((-1, 1)),
    "aten.eq": _compared((1, 0), (-1, 0)),
    "aten.ne": _differs,
    "aten.__and__": _both,
    "aten.bitwise_and": _both,
    "aten.logical_and": _both,
    "aten.unsqueeze": _reindexed(_unsqueeze),
    "aten.expand": _reindexed(_expand),
    "aten.slice": _reindexed(_slice),
    "aten.to": _cast,
    "aten._to_copy": _cast,
    "aten.diff": _difference,
    "aten.cumsum": _running_sum,
    "aten.index": _picked,
    "aten.tril": _triangle,
    "aten.triu": _upper_triangle,
}
ADDED = {"aten.full", "aten.triu", "aten.to", "aten._to_copy"}  # which may be of floats


KIND = "aten.scaled_dot_product_attention"
COPIES = ("aten.reshape", "aten.expand", "aten.unsqueeze")  # of shared heads, from the last on


def without_masks(tensors: list[Tensor], ops: list[Op], calls: list[Invocation]) -> None:
    """Drop, in place, every attention mask that is proven to be causal or to be all true."""
    masked = [i for i, op in enumerate(ops) if op.kind == KIND and _mask(op) is not None]
    if not masked:
        return
    forms = forms_of(tensors, ops)
    makers = {result: op for op in ops for result in op.results}
    for i in masked:
        mask = _mask(ops[i])
        assert mask is not None
        form = forms.get(mask)
        form = form.mask if isinstance(form, Added) else form
        if isinstance(form, Mask) and not ops[i].attributes["is_causal"]:
            causal = _is_causal(form, tensors[mask].type.shape)
            if causal is not None:
                ops[i], calls[i] = _rewritten(ops[i], calls[i], causal, tensors, makers)


def _mask(op: Op) -> int | None:
    return next((o.tensor for o in op.operands if o.name == "attn_mask"), None)


def _is_causal(mask: Mask, shape: tuple[int, ...]) -> bool | None:
    """Whether the mask is the causal one, or, where it hides nothing, not; else None."""
    binding = mask.binding(shape)
    if not binding:
        return False
    (bound, *more) = binding
    causal = Positions((*(0,) * (len(bound.coefficients) - 2), -1, 1), 0)
    return True if not more and bound == causal else None


def _rewritten(
    op: Op, call: Invocation, causal: bool, tensors: list[Tensor], makers: dict[int, Op]
) -> tuple[Op, Invocation]:
    given = {o.name: o.tensor for o in op.operands}
    shared = {name: _before_copies(given[name], tensors, makers) for name in ("key", "value")}
    heads = {None if t is None else tensors[t].type.shape[-3] for t in shared.values()}
    is_shared = None not in heads and len(heads) == 1
    changed = {"attn_mask": None, "is_causal": causal}
    if is_shared:
        changed["enable_gqa"] = True
        given |= {name: t for name, t in shared.items() if t is not None}
    operands = tuple(Operand(n, given[n]) for n in ("query", "key", "value"))
    return (
        replace(op, operands=operands, attributes={**op.attributes, **changed}),
        Invocation(call.target, {**call.arguments, **changed}),
    )


def _before_copies(tensor: int, tensors: list[Tensor], makers: dict[int, Op]) -> int | None:
    """[b, h, s, d] of which `tensor` [b, h * r, s, d] has r copies of each head, side by side."""
    shapes = [tensors[tensor].type.shape]
    for kind in COPIES:
        op = makers.get(tensor)
        if op is None or op.kind != kind:
            return None
        tensor = op.inputs[0]
        shapes.append(tensors[tensor].type.shape)
    copied, spread, lone, few = shapes
    if len(few) < 3 or len(spread) != len(few) + 1:
        return None
    *lead, heads, rows, size = few
    times = spread[-3]
    is_repeat = (
        lone == (*lead, heads, 1, rows, size)
        and spread == (*lead, heads, times, rows, size)
        and copied == (*lead, heads * times, rows, size)
    )
    return tensor if is_repeat else None
