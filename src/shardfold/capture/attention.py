"""Attention as the model runs it when it is not traced: without a mask that says "causal".

A library that cannot rule out other shapes builds the mask of causal attention element by element
when it is exported, and copies shared heads beside it. The shapes of a plan are fixed, so where
the mask is proven to be causal, or to hide nothing, the operator says so itself: the fused kernels
skip half of the work, and keys and values stay as few as they are.
"""

from __future__ import annotations

from dataclasses import replace

from shardfold.capture.closed import Mask, Positions, forms_of
from shardfold.capture.program import Invocation
from shardfold.graph import Op, Operand, Tensor

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
