"""How each operator runs on local shards, with a file for each family.

A maker turns a `Site` into a function of local tensors. Which operators have one is said in their
description (`local="own form"`); all others run by the same call on local tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardfold.errors import RunError
from shardfold.runtime.ops import (
    attention,
    batch_norm,
    counter_rng,
    effects,
    indexing,
    losses,
    matrix,
    norms,
    recurrent,
    reductions,
    views,
    windows,
)
from shardfold.runtime.ops.local_op import Context, Local, Site, plain

__all__ = ["FORMS", "Context", "Local", "Site", "localise"]

FORMS: Mapping[str, Callable[[Site], Local]] = {
    **views.TABLE,
    **matrix.TABLE,
    **reductions.TABLE,
    **losses.TABLE,
    **norms.TABLE,
    **batch_norm.TABLE,
    **attention.TABLE,
    **indexing.TABLE,
    **windows.TABLE,
    **recurrent.TABLE,
    **counter_rng.TABLE,
    **effects.TABLE,
}


def localise(site: Site) -> Local:
    """The local form of an operator: its own, or the same call."""
    if getattr(site.call.target, "_schema", None) is None:
        raise RunError(
            f"Operator {site.op.name} ({site.op.kind}) cannot be called outside a trace."
        )
    local = site.rule.rule.operator.local
    if local == "own form":
        return FORMS[site.op.kind](site)
    if local == "whole" and site.is_split:
        raise site.unsupported("the runtime does not know how to run it in parts")
    return plain(site)
