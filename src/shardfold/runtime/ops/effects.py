"""What forward leaves behind in buffers, and custom functions that run as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardfold.runtime.ops.local_op import Context, Local, Site


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


TABLE: Mapping[str, Callable[[Site], Local]] = {
    "shardfold.write": _write,
    "shardfold.function": _function,
}
