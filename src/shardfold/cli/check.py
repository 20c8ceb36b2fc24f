"""`shardfold check`: one step under a plan beside one device, compared number by number."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from shardfold.cli.options import size_options
from shardfold.cli.running import on_every_rank, real_model, run_options

if TYPE_CHECKING:
    from shardfold.plans import Plan
    from shardfold.run.check import Comparison


@click.command()
@click.argument("model")
@run_options
@size_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(
    model: str, plan_file: str, local: int | None, as_json: bool, **sizes: int | None
) -> None:
    r"""Run one training step of MODEL under a plan and on one device, in float64, and compare.

    The loss, every operator's result and every gradient must agree. If they do not, the first
    operator that differs is named, and the exit code is 1. MODEL is as in shardfold plan.

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
    from shardfold.cli.quiet import quiet
    from shardfold.run.check import compare
    from shardfold.run.train import check_data

    example = real_model(model, sizes)
    check_data(example.args, example.kwargs)
    with quiet():
        return compare(example.module, plan, example.args, example.kwargs, rules=example.rules)
