"""Matrix products with an addend: added by one device alone where the sum is in parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfold.runtime.ops.experts import Sorted, SortedLinear
from shardfold.runtime.ops.local_op import Context, Local, Site, only


def once(site: Site, name: str, *reduced: str) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """Operands with `name` zeroed on all devices but the first of each reduced factor's parts.

    It is masked rather than dropped: its gradient must flow on every device.
    """
    position = site.position(name)
    if position is None or not site.axes(*reduced) or site.is_first(*reduced):
        return lambda tensors: tensors
    at = position

    def prepared(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        nothing = only(tensors[at], tensors[at].new_zeros((), dtype=torch.bool))
        return [*tensors[:at], nothing, *tensors[at + 1 :]]

    return prepared


def _with_addend(addend: str) -> Callable[[Site], Local]:
    def make(site: Site) -> Local:
        reduced = tuple(site.rule.rule.reduced)
        prepared = once(site, addend, *reduced)

        def call(tensors: Sequence[Tensor], context: Context) -> Any:
            return site.invoke(prepared(tensors), context)

        return call

    return make


def _expert_linear(site: Site) -> Local:
    """Experts count from this device's first; rows of the others give zeros.

    Rows are sorted once for all operators that send them to the same experts (a block's two or
    three), and for their backward: the host waits for the device once.
    """
    first, _ = site.part("e") if site.axes("e") else (0, 0)
    given, weights, sent = (site.position(name) for name in ("x", "weight", "expert"))
    assert given is not None
    assert weights is not None
    assert sent is not None

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        if context.traced:
            moved = list(tensors)
            moved[sent] = moved[sent] - first
            return site.invoke(moved, context)
        x, weight, expert = tensors[given], tensors[weights], tensors[sent]
        found = _sorted(context, expert, first, weight.shape[0])
        return SortedLinear.apply(x, weight, found, expert.shape)

    return call


def _sorted(context: Context, expert: Tensor, first: int, experts: int) -> Sorted:
    """The rows in the order of their experts, as they were found for another operator or now."""
    key = (id(expert), expert._version, first, experts)
    if key not in context.sorted:
        # The tensor is kept with what was found of it: no other can have its identity.
        context.sorted[key] = expert, Sorted.of(expert - first if first else expert, experts)
    found: Sorted = context.sorted[key][1]
    return found


TABLE: Mapping[str, Callable[[Site], Local]] = {
    "aten.linear": _with_addend("bias"),
    "aten.addmm": _with_addend("self"),
    "aten.baddbmm": _with_addend("self"),
    "shardfold.expert_linear": _expert_linear,
}
