"""Into other training stacks: what `plan --for` prints and saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

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
        click.echo("\n".join(stack_plan_lines(found, model, saved=save)))


def check_free(options: Options) -> None:
    """Refuse options that a stack has no word for."""
    for name in ("mesh", "pins", "recompute"):
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
