"""Views: sizes among the arguments become those of the local result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfold.runtime.ops.local_op import Context, Local, Site, plain
from shardfold.sharding.configs import PASS


def _reshape(site: Site) -> Local:
    """Rows of a local part lie in the same order, but not always where a view could find them."""
    shape = site.results[0].shape
    return lambda tensors, context: tensors[0].reshape(shape)


def _expand(site: Site) -> Local:
    shape = site.results[0].shape
    return lambda tensors, context: tensors[0].expand(shape)


def _repeat(site: Site) -> Local:
    before, after = site.inputs[0].shape, site.results[0].shape
    lead = len(after) - len(before)
    # A dim of which this device has nothing is repeated as it is.
    times = [n // (before[k - lead] or n or 1) if k >= lead else n for k, n in enumerate(after)]
    return lambda tensors, context: tensors[0].repeat(times)


def _parts(site: Site) -> Local:
    """Split and chunk: the parts' own lengths along the dim."""
    dim = site.argument("dim", 0)
    lengths = [result.shape[dim] for result in site.results]

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        return torch.split(tensors[0], lengths, dim)

    return call


def _pad(site: Site) -> Local:
    if PASS in site.config and site.argument("value", 0.0):
        raise site.unsupported("a pad with a value other than 0 is no sum of its parts")
    return plain(site)


def _put_along(site: Site) -> Local:
    """Of complex numbers, their parts are put: torch has no gradient for complex results here."""

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        into, value = tensors
        if not into.is_complex():
            return site.invoke(tensors, context)
        parts = [torch.view_as_real(t.to(into.dtype).resolve_conj()) for t in (into, value)]
        dim = site.argument("dim", 0) % into.dim()
        return torch.view_as_complex(site.invoke(parts, context, dim=dim))

    return call


TABLE: Mapping[str, Callable[[Site], Local]] = {
    **{
        f"aten.{name}": _reshape
        for name in (
            *("view", "reshape", "_unsafe_view", "flatten", "ravel", "unflatten", "squeeze"),
            *("unsqueeze", "view_as", "reshape_as"),
        )
    },
    **{f"aten.{name}": _expand for name in ("expand", "expand_as", "broadcast_to")},
    **{f"aten.{name}": _parts for name in ("split", "split_with_sizes", "chunk", "tensor_split")},
    "aten.repeat": _repeat,
    **{f"aten.{name}_scatter": _put_along for name in ("slice", "select")},
    "aten.pad": _pad,
    "aten.constant_pad_nd": _pad,
}
