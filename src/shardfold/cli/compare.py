"""`shardfold compare`: a model's best plan against other methods, or one plan against another."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardfold.cli.options import (
    PLANNING,
    checked,
    output_options,
    planning_options,
    size_options,
    taken,
)
from shardfold.errors import PlanError

if TYPE_CHECKING:
    from shardfold.planner.compare_methods import Comparison


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="MODEL | A.json B.json")
@click.option("--cluster", help="Such as 8xa100, 4x8xh100 or lab.toml.")
@click.option("--methods", help="Comma-separated; all if left out. --methods list names them.")
@size_options
@planning_options
@click.option(
    "--moves",
    type=click.IntRange(min=1),
    default=50_000,
    show_default=True,
    help="Random moves of mcmc, at most.",
)
@click.option(
    "--ilp-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Time for the integer program.",
)
@click.option(
    "--chart", type=click.Path(dir_okay=False), metavar="FILE.svg", help="Draw the steps as bars."
)
@click.option(
    "--save-plans",
    type=click.Path(file_okay=False),
    metavar="FOLDER",
    help="Write a plan of every method there, such as megatron.json.",
)
@output_options
def compare(what: tuple[str, ...], as_json: bool, everything: bool, **options: Any) -> None:
    r"""Compare the best plan of MODEL with baselines and other searches.

    With two saved plans of one model instead, show the operators that they split differently.
    MODEL is as in shardfold plan.

    \b
    shardfold compare gpt2 --cluster 8xa100 --methods selected,fsdp,megatron
    shardfold compare mine.json theirs.json
    """
    if options["methods"] == "list":
        from shardfold.planner.compare_methods import METHODS

        click.echo("\n".join(METHODS))
    elif len(what) == 2:
        _plans(what[0], what[1], as_json, everything, options)
    elif len(what) == 1:
        _methods(what[0], as_json, options)
    else:
        raise click.UsageError(f"Give one MODEL or two plans, not {len(what)} arguments.")


def _plans(first: str, second: str, as_json: bool, everything: bool, options: Any) -> None:
    """Show where two saved plans differ."""
    alone = ("cluster", "methods", "chart", "save_plans", *PLANNING)
    given = [name for name in alone if options[name] not in (None, ())]
    if given:
        name = {"pins": "pin"}.get(given[0], given[0]).replace("_", "-")
        raise click.UsageError(f"--{name} goes with one MODEL, not with two plans.")
    from shardfold.plans import load
    from shardfold.plans.diff import difference

    found = difference(load(first), load(second))
    if as_json:
        click.echo(json.dumps({"plans": [first, second], **asdict(found)}, indent=2))
        return
    from shardfold.report.comparison import difference_view

    names = (Path(first).name, Path(second).name)
    _print(difference_view(found, names if len(set(names)) == 2 else (first, second), everything))


def _methods(model: str, as_json: bool, options: Any) -> None:
    """Compare methods on one model and cluster."""
    if options["cluster"] is None:
        raise click.UsageError("A comparison of methods needs --cluster, such as 8xa100.")
    chart = options["chart"]
    if chart is not None and not Path(chart).parent.is_dir():
        raise PlanError(f"Cannot write {chart}: the folder {Path(chart).parent} does not exist.")
    found = _compared(model, options)
    title = f"{model} on {found.cluster}"
    if chart is not None:
        from shardfold.report.comparison import chart as drawn

        Path(chart).write_text(drawn(found, title))
    if as_json:
        click.echo(json.dumps({"model": model, **found.as_plain()}, indent=2))
        return
    from shardfold.report.comparison import comparison_view

    _print(comparison_view(found, title))
    if chart is not None:
        click.echo(f"Drawn to {chart}")


def _compared(model: str, options: Any) -> Comparison:
    from shardfold.cli.model import planner_for
    from shardfold.planner.compare_methods import METHODS, Effort, check_methods

    methods = METHODS if options["methods"] is None else tuple(options["methods"].split(","))
    check_methods(methods)
    asked = taken(options)
    target = checked(options["cluster"], asked)
    sizes = {name: options[name] for name in ("batch", "seq", "layers", "hidden")}
    with planner_for(model, sizes, cluster=target, **asked) as planner:
        return planner.compare(
            methods=methods,
            save_plans=options["save_plans"],
            effort=Effort(moves=options["moves"], ilp_seconds=options["ilp_seconds"]),
        )


def _print(view: Any) -> None:
    from rich.console import Console

    from shardfold.cli.printing import WIDEST

    console = Console(highlight=False)
    console.print(view, width=min(console.width, WIDEST))
