"""The stage as one function: skeleton, export, convert."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from shardfold.capture.convert import convert, convert_folded
from shardfold.capture.export import export
from shardfold.capture.meta_copy import WithLoss, check_model, on_meta, skeleton
from shardfold.capture.program import Program
from shardfold.capture.repeated_blocks import Hollow, UnfoldableError, hollow
from shardfold.capture.replicas import Folded, fold_short, has_global_hooks
from shardfold.capture.replicas import fold as fold_blocks
from shardfold.capture.shorten import Run
from shardfold.graph import Graph

Folding = Callable[[Hollow, tuple[Any, ...], dict[str, Any]], tuple[Folded | None, tuple[Run, ...]]]


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


def capture_short(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dtype: str | None = None,
    loss: Callable[[Any], Any] | None = None,
) -> Graph:
    """As `capture`, but of a long run of blocks only a few periods are in the graph.

    `Graph.repeats` says what they stand for: a depth of 1,000 costs hardly more than one of 10.
    """
    return _trace(model, args, kwargs, dtype, loss, fold_short).graph


def capture_program(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dtype: str | None = None,
    loss: Callable[[Any], Any] | None = None,
    fold: bool = True,
    short: bool = False,
) -> Program:
    """As `capture`, with what is needed to run the graph's operators; `short` as `capture_short`.

    What a short graph leaves out cannot be run.
    """
    folding = fold_short if short else _fold_all if fold else None
    return _trace(model, args, kwargs, dtype, loss, folding)


def _trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    dtype: str | None,
    loss: Callable[[Any], Any] | None,
    folding: Folding | None,
) -> Program:
    check_model(model)
    example = on_meta((tuple(args), dict(kwargs or {})), dtype)
    notes: tuple[str, ...] = ()
    if folding is not None and not has_global_hooks():
        outer = hollow(model, dtype, loss)
        try:
            program = None if outer is None else _folded(outer, example, folding)
            if program is not None:
                return program
        except UnfoldableError as error:
            notes = (f"Traced in full: {error}.",)
    copied = skeleton(model, dtype)
    program = convert(export(copied if loss is None else WithLoss(copied, loss), *example))
    return replace(program, graph=replace(program.graph, notes=notes))


def _folded(outer: Hollow, example: Any, folding: Folding) -> Program | None:
    """The model with its blocks traced once, in the given way or else with all that repeat."""
    try:
        folded, runs = folding(outer, *example)
        return None if folded is None else convert_folded(folded, runs)
    except UnfoldableError:
        if folding is _fold_all:
            raise
    return _folded(outer, example, _fold_all)


def _fold_all(
    model: Hollow, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Folded | None, tuple[Run, ...]]:
    return fold_blocks(model, args, kwargs), ()
