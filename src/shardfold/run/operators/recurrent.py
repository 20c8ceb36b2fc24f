"""Recurrent networks: the batch in parts. Hidden units in parts are not run yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardfold.errors import RunError
from shardfold.run.operators.site import Local, Site


def _recurrent(site: Site) -> Local:
    if set(site.split) - {"b"}:
        raise site.unsupported("only the batch of a recurrent network is run in parts")
    if site.argument("dropout", 0.0) and site.argument("train", True):
        raise RunError(
            f"Operator {site.op.name} ({site.op.kind}, {site.op.origin}) draws its own dropout "
            "between layers, which would differ between devices. Set dropout=0 and put "
            "nn.Dropout between single layers."
        )
    return site.invoke


TABLE: Mapping[str, Callable[[Site], Local]] = {
    f"aten.{name}": _recurrent for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}
