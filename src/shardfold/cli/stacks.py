"""Into other training stacks: what `plan --for` prints and saves; `export` of a saved plan."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardfold.cli.options import size_options

if TYPE_CHECKING:
    from shardfold.cluster import Cluster
    from shardfold.planner.options import Options


def plan_for(
    model: str,
    cluster: Cluster,
    stack: str,
    beside_plan: bool,
    save: str | None,
    as_json: bool,
    sizes: dict[str, Any],
    options: Options,
) -> None:
    """Find the best configuration of a stack; print it, or save its file."""
    from shardfold.cli.model import planner_for
    from shardfold.export.targets import target_named
    from shardfold.report.stack_text import stack_plan_lines

    check_free(options)
    target_named(stack)
    with planner_for(model, sizes, cluster=cluster, **options) as planner:
        found = planner.plan_for(stack, beside_plan=beside_plan)
    if save is not None:
        write_whole(Path(save), found.text)
    if as_json:
        plain = {"model": model, **found.as_plain(), "saved": save}
        click.echo(json.dumps(plain, indent=2))
    else:
        show(stack_plan_lines(found, model, saved=save), found.text)


def show(lines: Iterable[str], text: str) -> None:
    """Print lines within the terminal's width; those of the stack's own text stay as they are."""
    from rich.console import Console

    from shardfold.cli.printing import WIDEST

    width, own = min(Console().width, WIDEST), set(text.splitlines())
    for line in lines:
        if line in own or len(line) <= width:
            click.echo(line)
        else:
            indent = line[: len(line) - len(line.lstrip())]
            click.echo(textwrap.fill(line, width, subsequent_indent=indent + "  "))


def check_free(options: Options) -> None:
    """Refuse options that no configuration of a stack has."""
    for name in ("mesh", "pins", "recompute", "pipeline", "prefer"):
        if name in options:
            flag = {"pins": "--pin"}.get(name, f"--{name}")
            raise click.UsageError(f"{flag} is of shardfold's own plan: it does not go with --for.")


def write_whole(path: Path, text: str) -> None:
    """Write a file as a whole, or not at all."""
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_text(text)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@click.command()
@click.argument("file", metavar="PLAN.json")
@click.option("--to", "stack", required=True, metavar="STACK", help="A stack, or dtensor.")
@click.option("--model", help="The MODEL of the plan (as in shardfold plan); not for dtensor.")
@size_options
@click.option("--save", type=click.Path(dir_okay=False), help="Write it to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def export(
    file: str,
    stack: str,
    model: str | None,
    save: str | None,
    as_json: bool,
    **sizes: int | None,
) -> None:
    r"""Write PLAN.json as another stack's configuration, with what that costs; or for DTensor.

    STACK is torchtitan, megatron, hf, accelerate, deepspeed or nanotron: the configuration nearest
    to the plan, priced as the stack runs it. What it cannot express is listed. dtensor: the
    placements of every parameter and result, as JSON.

    \b
    shardfold export plan.json --to accelerate --model gpt2
    shardfold export plan.json --to dtensor --save placements.json
    """
    from shardfold.cli.plan import check_writable
    from shardfold.plans import load

    if save is not None:
        check_writable(Path(save))
    plan = load(file)
    if stack == "dtensor":
        from shardfold.export.dtensor import as_dtensor

        text = json.dumps(as_dtensor(plan), indent=2) + "\n"
        if save is not None:
            write_whole(Path(save), text)
        click.echo(f"Saved to {save}" if save is not None and not as_json else text.rstrip("\n"))
        return
    from shardfold.cli.model import planner_for
    from shardfold.export.targets import target_named
    from shardfold.report.stack_text import projection_lines

    target_named(stack)
    if model is None:
        raise click.UsageError("PLAN.json needs its --model: what is exported is priced again.")
    with planner_for(model, sizes) as planner:
        found = planner.export(plan, stack)
    if save is not None:
        write_whole(Path(save), found.written.text)
    if as_json:
        click.echo(json.dumps({"model": model, **found.as_plain(), "saved": save}, indent=2))
    else:
        show(projection_lines(found, model, saved=save), found.written.text)
