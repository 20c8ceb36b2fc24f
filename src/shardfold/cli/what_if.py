"""`shardfold what-if`: the best plan if something changes, beside the splits of a saved one."""

from __future__ import annotations

import json
from typing import Any

import click

from shardfold.cli.options import checked, planning_options, size_options, taken


@click.command(name="what-if")
@click.argument("file", metavar="PLAN.json")
@click.option("--model", required=True, help="The MODEL of the plan (as in shardfold plan).")
@click.option("--cluster", help="Other devices, such as 4x8xh100; the plan's own if left out.")
@size_options
@planning_options
@click.option("--save", type=click.Path(dir_okay=False), help="Write the new plan to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def what_if(
    file: str, model: str, cluster: str | None, save: str | None, as_json: bool, **options: Any
) -> None:
    r"""Plan again with something changed, and price the splits of PLAN.json there.

    What is not given stays as in the plan: cluster, dtype, optimizer, memory limit, pins and all
    other options. Sizes that the plan was made with are given again, or changed.

    \b
    shardfold what-if plan.json --model gpt2 --cluster 4x8xh100
    shardfold what-if plan.json --model gpt2 --memory-limit 40GiB --save small.json
    """
    from pathlib import Path

    from shardfold.api import Planner
    from shardfold.cli.model import load_model
    from shardfold.cli.plan import check_writable
    from shardfold.cli.printing import progress, quiet, summary
    from shardfold.plans import load

    if save is not None:
        check_writable(Path(save))
    plan, changes = load(file), taken(options)
    target = None if cluster is None else checked(cluster, changes)
    with progress() as watch:
        with quiet():
            example = load_model(model, options)
        with quiet(mute=True):
            planner = Planner(
                example.module, example.args, example.kwargs, rules=example.rules, watch=watch
            )
            found = planner.what_if(plan, cluster=target, **changes)
    if save is not None:
        found.after.save(save)
    if not as_json:
        click.echo(str(found))
        return
    kept = {
        "step_seconds": found.kept.step_seconds,
        "peak_bytes": found.kept.peak_bytes,
        "reason": found.kept.reason,
    }
    before, after = summary(found.before, model, file), summary(found.after, model, save)
    click.echo(json.dumps({"before": before, "after": after, "kept": kept}, indent=2))
