"""What `check` and `train` share: the plan, the processes, and the model on each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shardfold.errors import RunError

if TYPE_CHECKING:
    from shardfold.cli.model import Example
    from shardfold.plans import Plan

Function = TypeVar("Function", bound=Callable[..., Any])


def run_options(command: Function) -> Function:
    """Add the options that say what is run, and where."""
    command = click.option(
        "--local", type=click.IntRange(min=1), help="Start so many processes here."
    )(command)
    return click.option("--plan", "plan_file", required=True, help="A plan saved by plan --save.")(
        command
    )


def processes_of(plan: Plan, local: int | None) -> int:
    """How many processes to start; as many as the plan is for."""
    from math import prod

    size = prod(axis.size for axis in plan.mesh)
    if local is not None and local != size:
        raise RunError(f"The plan is for {size} processes, not --local {local}.")
    if local is None and size > 1:
        raise RunError(
            f"The plan is for {size} processes: start them here with --local {size}, or with "
            f"torchrun --nproc-per-node {size} -m shardfold ..."
        )
    return size


def on_every_rank(
    function: Callable[..., Any],
    plan: Plan,
    local: int | None,
    *args: Any,
    wait_seconds: float | None = None,
) -> Any | None:
    """Rank 0's result of `function(rank, *args)`; None on the other ranks of torchrun."""
    from datetime import timedelta

    from shardfold.run.launch import WAIT, is_started, joined, launch

    if local is None and is_started():
        wait = WAIT if wait_seconds is None else timedelta(seconds=wait_seconds)
        with joined(wait) as (rank, _):
            found = function(rank, *args)
            return found if rank == 0 else None
    return launch(function, processes_of(plan, local), *args)[0]


def real_model(text: str, sizes: Mapping[str, int | None]) -> Example:
    """The model with weights and a batch that have data."""
    from shardfold.cli.model import load_model
    from shardfold.cli.quiet import quiet

    with quiet():
        return load_model(text, sizes, device="cpu")
