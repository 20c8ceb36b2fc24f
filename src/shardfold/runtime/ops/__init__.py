"""How each operator runs on local shards, with a file for each family.

A maker turns a `Site` into a function of local tensors. Which operators have one is said in their
description (`local="own form"`); all others run by the same call on local tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardfold.errors import RunError
from shardfold.runtime.ops import (
    attention,
    convolution,
    counter_rng,
    dispatch,
    dropout,
    indexing,
    losses,
    matrix,
    norms,
    recurrent,
    reductions,
    views,
)
from shardfold.runtime.ops.local_op import Context, Local, Site, plain

__all__ = ["FORMS", "Context", "Local", "Site", "localise"]


def _write(site: Site) -> Local:
    """Remember a buffer's new value; the module takes it when the step has ended."""
    buffer = site.op.inputs[0]
    if site.argument("is_left"):  # in eval mode
        return lambda tensors, context: tensors[1]

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        context.writes[buffer] = tensors[1].detach()
        return tensors[1]

    return call


def _function(site: Site) -> Local:
    """An autograd.Function with its own backward, on whole tensors."""
    function = site.call.arguments["name"]
    return lambda tensors, context: function(list(tensors))


FORMS: Mapping[str, Callable[[Site], Local]] = {
    **views.TABLE,
    **matrix.TABLE,
    **dispatch.TABLE,
    **reductions.TABLE,
    **losses.TABLE,
    **norms.TABLE,
    **attention.TABLE,
    **indexing.TABLE,
    **convolution.TABLE,
    **recurrent.TABLE,
    **counter_rng.TABLE,
    **dropout.TABLE,
    "shardfold.write": _write,
    "shardfold.function": _function,
}


def localise(site: Site) -> Local:
    """The local form of an operator: its own, or the same call."""
    if getattr(site.call.target, "_schema", None) is None:
        raise RunError(
            f"Operator {site.op.name} ({site.op.kind}) cannot be called outside a trace."
        )
    local = site.rule.rule.operator.local
    if local == "whole" and site.is_split:
        raise site.unsupported("the runtime does not know how to run it in parts")
    form = FORMS[site.op.kind](site) if local == "own form" else plain(site)
    means = site.rule.rule.means.intersection(site.split)
    if not means:
        return form
    share = math.prod(site.points(base) / site.size(base) for base in means)
    return lambda tensors, context: form(tensors, context) * share
