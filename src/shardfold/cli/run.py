"""What `check` and `train` share: the plan, the processes, and the model on each of them.

`shardfold check`: two steps under a plan compared with the plain module on one device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shardfold.cli.options import size_options
from shardfold.errors import RunError

if TYPE_CHECKING:
    from shardfold.cli.model import Example
    from shardfold.plans import Plan
    from shardfold.runtime.check import Comparison

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

    from shardfold.runtime.ranks import WAIT, is_started, joined, launch

    if local is None and is_started():
        wait = WAIT if wait_seconds is None else timedelta(seconds=wait_seconds)
        with joined(wait) as (rank, _):
            found = function(rank, *args)
            return found if rank == 0 else None
    return launch(function, processes_of(plan, local), *args)[0]


def real_model(text: str, sizes: Mapping[str, int | None]) -> Example:
    """The model with weights and a batch that have data."""
    from shardfold.cli.model import load_model
    from shardfold.cli.printing import quiet

    with quiet():
        return load_model(text, sizes, device="cpu")


@click.command()
@click.argument("model")
@run_options
@size_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(
    model: str, plan_file: str, local: int | None, as_json: bool, **sizes: int | None
) -> None:
    r"""Run two training steps of MODEL under a plan and in plain PyTorch, and compare.

    The module itself, its captured program on one device and the plan's splits run the same two
    batches in float64. Loss, every operator's result, every gradient and buffer must agree. If
    they do not, what differs first is named, and the exit code is 1. MODEL is as in shardfold
    plan.

    \b
    shardfold check gpt2-tiny --plan plan.json --local 2
    """
    from shardfold.plans import load

    plan = load(plan_file)
    found = on_every_rank(_compare, plan, local, plan, model, sizes)
    if found is None:
        return
    if as_json:
        click.echo(json.dumps({"equal": found.is_equal, **asdict(found)}, indent=2))
    else:
        click.echo(str(found))
    if not found.is_equal:
        raise click.exceptions.Exit(1)


def _compare(rank: int, plan: Plan, model: str, sizes: dict[str, int | None]) -> Comparison:
    from shardfold.cli.printing import quiet
    from shardfold.runtime.check import compare
    from shardfold.runtime.training import check_data

    example = real_model(model, sizes)
    check_data(example.args, example.kwargs)
    with quiet():
        return compare(example.module, plan, example.args, example.kwargs, rules=example.rules)
