"""A plan for the devices that are there now, made as another plan was made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shardfold.api import plan
from shardfold.cluster import from_plain
from shardfold.cluster.cluster import resized
from shardfold.operators import Maker
from shardfold.plans import Plan

if TYPE_CHECKING:
    from torch import nn

AS_IN_MODEL = "as in the model"


def replan(
    before: Plan,
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    devices: int,
    within: int | None = None,
    loss: Callable[[Any], Any] | None = None,
    rules: Mapping[str, Maker] | None = None,
) -> Plan:
    """Plan for `devices` devices, `within` of them on a node, with the same links and options."""
    made = before.provenance
    cluster = resized(from_plain(made.cluster), devices, within or devices)
    dtype = None if made.dtype == AS_IN_MODEL else made.dtype
    options: dict[str, Any] = {"dtype": dtype, "optimizer": made.optimizer, "cost": made.cost}
    return plan(model, args, kwargs, cluster=cluster, loss=loss, rules=rules, **options)
