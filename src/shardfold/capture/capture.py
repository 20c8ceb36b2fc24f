"""The stage as one function: skeleton, export, convert."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from shardfold.capture.convert import convert
from shardfold.capture.export import export
from shardfold.capture.program import Program
from shardfold.capture.skeleton import WithLoss, on_meta, skeleton
from shardfold.graph import Graph


def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dtype: str | None = None,
    loss: Callable[[Any], Any] | None = None,
) -> Graph:
    """Trace one training step's forward pass of `model` into a `Graph`.

    The model itself is never touched or run: a copy whose parameters live on the meta device
    (and have `dtype`, if one is given) is traced. `loss` turns the model's output into a scalar
    where the model does not return one itself.
    """
    return capture_program(model, args, kwargs, dtype=dtype, loss=loss).graph


def capture_program(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dtype: str | None = None,
    loss: Callable[[Any], Any] | None = None,
) -> Program:
    """As `capture`, with what is needed to run the graph's operators."""
    copied = skeleton(model, dtype)
    traced = copied if loss is None else WithLoss(copied, loss)
    meta_args, meta_kwargs = on_meta((tuple(args), dict(kwargs or {})), dtype)
    return convert(export(traced, meta_args, meta_kwargs))
