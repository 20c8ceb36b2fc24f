"""Matrix products with an addend: added by one device alone where the sum is in parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardfold.run.operators.site import Context, Local, Site


def once(site: Site, name: str, *reduced: str) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """Operands with `name` zeroed on all devices but the first of each reduced factor's parts.

    It is multiplied rather than dropped: its gradient must flow on every device.
    """
    position = site.position(name)
    if position is None or not site.axes(*reduced) or site.is_first(*reduced):
        return lambda tensors: tensors
    at = position
    return lambda tensors: [*tensors[:at], tensors[at] * 0, *tensors[at + 1 :]]


def _with_addend(addend: str) -> Callable[[Site], Local]:
    def make(site: Site) -> Local:
        reduced = tuple(site.rule.rule.reduced)
        prepared = once(site, addend, *reduced)

        def call(tensors: Sequence[Tensor], context: Context) -> Any:
            return site.invoke(prepared(tensors), context)

        return call

    return make


def _expert_linear(site: Site) -> Local:
    """Experts count from this device's first; rows of the others give zeros."""
    first, _ = site.part("e") if site.axes("e") else (0, 0)
    position = site.position("expert")
    assert position is not None

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        given = list(tensors)
        given[position] = given[position] - first
        return site.invoke(given, context)

    return call


TABLE: Mapping[str, Callable[[Site], Local]] = {
    "aten.linear": _with_addend("bias"),
    "aten.addmm": _with_addend("self"),
    "aten.baddbmm": _with_addend("self"),
    "shardfold.expert_linear": _expert_linear,
}
