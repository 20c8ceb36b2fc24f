"""How each operator runs on local parts, one family a file.

A maker turns a `Site` into a function of local tensors. An operator that is not split is called
as it is, whatever it is; a split that no maker knows is refused before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from shardfold.errors import RunError
from shardfold.runtime.ops import (
    attention,
    batch_norm,
    counter_rng,
    effects,
    elementwise,
    indexing,
    losses,
    matrix,
    norms,
    recurrent,
    reductions,
    views,
    windows,
)
from shardfold.runtime.ops.local_op import Context, Local, Site

__all__ = ["TABLE", "Context", "Local", "Site", "localise"]

TABLE: Mapping[str, Callable[[Site], Local]] = {
    **elementwise.TABLE,
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


def localise(site: Site, trusted: Collection[str] = ()) -> Local:
    """The local form of an operator; `trusted` kinds, which have a user's rule, run as they are."""
    if getattr(site.call.target, "_schema", None) is None:
        raise RunError(
            f"Operator {site.op.name} ({site.op.kind}) cannot be called outside a trace."
        )
    if site.op.kind in trusted:
        return elementwise.plain(site)
    maker = TABLE.get(site.op.kind)
    if maker is not None:
        return maker(site)
    if site.is_split:
        raise site.unsupported("the runner does not know how to run it in parts")
    return site.invoke
