"""Keeps other libraries' chatter off stdout and stderr while a model is built and captured.

What `plan` and `show` print: a plan as a table or as one JSON object; progress on stderr.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    redirect_stderr,
    redirect_stdout,
)
from typing import Any

import click
import msgspec

from shardfold.plans import Plan


@contextmanager
def quiet(*, mute: bool = False) -> Iterator[None]:
    """No warnings, no advice of torch or transformers; what is printed goes to stderr.

    stdout belongs to the command's own output, so that it can be piped. Under `mute` what is
    printed goes nowhere: where tracing fails, torch prints the program that it had so far.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    loggers = [logging.getLogger(name) for name in ("torch", "transformers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with ExitStack() as stack:
            sink = stack.enter_context(open(os.devnull, "w")) if mute else sys.stderr
            stack.enter_context(redirect_stdout(sink))
            stack.enter_context(redirect_stderr(sink))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


WIDEST = 110  # columns: wider tables are harder to read, not easier


def emit(
    plan: Plan, *, as_json: bool, everything: bool, model: str | None, saved: str | None = None
) -> None:
    """Print a plan on stdout."""
    if as_json:
        click.echo(json.dumps(summary(plan, model, saved), indent=2))
        return
    from rich.console import Console

    from shardfold.report import plan_view, view

    console = Console(highlight=False)
    width = min(console.width, WIDEST)
    shown = view(plan, model=model, everything=everything)
    console.print(plan_view(shown, width), width=width)
    if saved is not None:
        console.print(f"Saved to {saved}", markup=False)


def summary(plan: Plan, model: str | None, saved: str | None = None) -> dict[str, Any]:
    """A plan's figures; the plan itself, with every operator, is what `--save` writes."""
    from shardfold.report.summary_text import likely_range

    e, made = plan.estimate, plan.provenance
    return {
        "model": model or made.model or None,
        "cluster": plan.cluster,
        "mesh": "x".join(str(axis.size) for axis in plan.mesh) or "1",
        "mesh_axes": [{"name": a.name, "size": a.size, "level": a.level} for a in plan.mesh],
        **msgspec.to_builtins(e),
        "step_range_seconds": likely_range(plan),
        "simulated": plan.simulation is not None,
        "mfu": None if plan.simulation is None else plan.simulation.mfu,
        "fits": plan.fits,
        "unsplit_ops": [msgspec.to_builtins(entry) for entry in plan.unsplit],
        "experiments": [msgspec.to_builtins(entry) for entry in plan.experiments],
        "baselines": [msgspec.to_builtins(each) for each in plan.finalists if each.is_baseline],
        "meshes": [msgspec.to_builtins(tried) for tried in plan.meshes],
        "pins": [] if plan.pinned is None else [msgspec.to_builtins(p) for p in plan.pinned.pins],
        "free_step_seconds": None if plan.pinned is None else plan.pinned.free_seconds,
        "micro_batches": plan.micro_batches,
        "operators": made.operators,
        "parameters": made.parameters,
        "cost": made.request.cost,
        "optimizer": made.request.optimizer,
        "precision": made.request.numbers,
        "compiled": made.request.compile,
        "request": msgspec.to_builtins(made.request),
        "capture_seconds": made.capture_seconds,
        "search_seconds": made.search_seconds,
        "notes": list(made.notes),
        "graph": made.graph,
        "versions": made.versions,
        "saved": saved,
    }


def progress() -> AbstractContextManager[Callable[[Any], None]]:
    """A watch that draws on stderr where that is a terminal, and else looks away."""
    from rich.console import Console

    from shardfold.report import drawn

    return drawn(Console(file=sys.stderr))  # this stderr, whatever is redirected later
