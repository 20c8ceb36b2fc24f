"""The stage as one function: skeleton, export, convert."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from shardfold.capture.convert import convert, convert_folded
from shardfold.capture.export import export
from shardfold.capture.folding import UnfoldableError
from shardfold.capture.folding import fold as fold_blocks
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
    fold: bool = True,
) -> Graph:
    """Trace one training step's forward pass of `model` into a `Graph`.

    The model itself is never touched or run: a copy whose parameters live on the meta device
    (and have `dtype`, if one is given) is traced. `loss` turns the model's output into a scalar
    where the model does not return one itself. With `fold`, repeated blocks are traced once,
    where they are proven to be replicas; the graph is the same.
    """
    return capture_program(model, args, kwargs, dtype=dtype, loss=loss, fold=fold).graph


def capture_program(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dtype: str | None = None,
    loss: Callable[[Any], Any] | None = None,
    fold: bool = True,
) -> Program:
    """As `capture`, with what is needed to run the graph's operators."""
    copied = skeleton(model, dtype)
    traced = copied if loss is None else WithLoss(copied, loss)
    meta_args, meta_kwargs = on_meta((tuple(args), dict(kwargs or {})), dtype)
    if fold:
        try:
            folded = fold_blocks(traced, meta_args, meta_kwargs)
            if folded is not None:
                return convert_folded(folded)
        except UnfoldableError as reason:
            note = f"Traced in full: {reason}."
            program = convert(export(traced, meta_args, meta_kwargs))
            return replace(program, graph=replace(program.graph, notes=(note,)))
    return convert(export(traced, meta_args, meta_kwargs))
