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
from shardfold.plans.plan import Pinned


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

    from shardfold.report import plan_view

    console = Console(highlight=False)
    width = min(console.width, WIDEST)
    console.print(plan_view(plan, model=model, everything=everything, width=width), width=width)
    if saved is not None:
        console.print(f"Saved to {saved}", markup=False)


def summary(plan: Plan, model: str | None, saved: str | None = None) -> dict[str, Any]:
    """A plan's figures; the plan itself, with every operator, is what `--save` writes."""
    e, made = plan.estimate, plan.provenance
    return {
        "model": model,
        "cluster": plan.cluster,
        "mesh": "x".join(str(axis.size) for axis in plan.mesh) or "1",
        "mesh_axes": [{"name": a.name, "size": a.size, "level": a.level} for a in plan.mesh],
        "step_seconds": e.step_seconds,
        "compute_seconds": e.compute_seconds,
        "communication_seconds": e.communication_seconds,
        "update_seconds": e.update_seconds,
        "data_parallel_seconds": e.data_parallel_seconds,
        "fully_sharded_seconds": e.fully_sharded_seconds,
        "lower_bound_seconds": e.lower_bound_seconds,
        "optimal": e.optimal,
        "peak_bytes": e.peak_bytes,
        "data_parallel_bytes": e.data_parallel_bytes,
        "fully_sharded_bytes": e.fully_sharded_bytes,
        "device_bytes": e.device_bytes,
        "limit_bytes": e.limit_bytes,
        "min_feasible_bytes": e.min_feasible_bytes,
        "fits": plan.fits,
        "unsplit_ops": [
            {
                "kind": u.kind,
                "count": u.count,
                "seconds": u.seconds,
                "share": u.share,
                "reason": u.reason,
            }
            for u in plan.unsplit
        ],
        "meshes": [
            {
                "mesh": tried.mesh,
                "step_seconds": tried.step_seconds,
                "lower_bound_seconds": tried.lower_bound_seconds,
            }
            for tried in plan.meshes
        ],
        "pins": [] if plan.pinned is None else _pins(plan.pinned),
        "free_step_seconds": None if plan.pinned is None else plan.pinned.free_seconds,
        "micro_batches": plan.micro_batches,
        "operators": made.operators,
        "parameters": made.parameters,
        "cost": made.request.cost,
        "optimizer": made.request.optimizer,
        "dtype": made.request.dtype,
        "request": msgspec.to_builtins(made.request),
        "capture_seconds": made.capture_seconds,
        "search_seconds": made.search_seconds,
        "notes": list(made.notes),
        "graph": made.graph,
        "versions": made.versions,
        "saved": saved,
    }


def _pins(pinned: Pinned) -> list[dict[str, Any]]:
    return [
        {"pattern": pin.pattern, "split": pin.split, "operators": pin.operators}
        for pin in pinned.pins
    ]


def progress() -> AbstractContextManager[Callable[[Any], None]]:
    """A watch that draws on stderr where that is a terminal, and else looks away."""
    from rich.console import Console

    from shardfold.report import drawn

    return drawn(Console(file=sys.stderr))  # this stderr, whatever is redirected later
