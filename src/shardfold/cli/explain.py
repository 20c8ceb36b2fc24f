"""`shardfold explain`: why a plan is as it is; `what-if`: the best if something changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardfold.cli.options import checked, output_options, planning_options, size_options, taken

if TYPE_CHECKING:
    from shardfold.planner.options import Options


@click.command()
@click.argument("source", metavar="MODEL|PLAN.json")
@click.argument("op", required=False)
@click.option("--cluster", help="Such as 8xa100, 4x8xh100 or lab.toml; with MODEL.")
@click.option("--model", help="The MODEL of PLAN.json.")
@size_options
@planning_options
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=20.0,
    show_default=True,
    help="With OP: time to look for what would have to change for another split to win.",
)
@output_options
def explain(
    source: str,
    op: str | None,
    cluster: str | None,
    model: str | None,
    seconds: float,
    as_json: bool,
    everything: bool,
    **options: Any,
) -> None:
    r"""Explain the split of the operators that match OP: what any other split would cost.

    OP is a module's path, with * and ?, or an operator's name; without it the slowest operators
    are explained. Every other split is priced with everything else searched again around it. If OP
    is given, faster or slower links, more memory and other batches are tried, too, for --seconds.

    \b
    shardfold explain gpt2-tiny --cluster 2x2xh100 'transformer.h.0.mlp.*'
    shardfold explain plan.json --model gpt2-tiny lm_head
    """
    from shardfold.cli.model import planner_for
    from shardfold.plans import load

    asked = taken(options)
    is_plan = _is_plan(source)
    _check_usage(is_plan, cluster, model, asked)
    plan = load(source) if is_plan else None
    target = None if cluster is None else checked(cluster, asked)
    with planner_for(model or source, options, cluster=target, **asked) as planner:
        found = planner.explain(
            planner.plan() if plan is None else plan,
            op=op,
            everything=everything,
            seconds=0.0 if op is None or everything else seconds,
            profile=asked.get("profile"),
        )
    if as_json:
        import json

        import msgspec

        click.echo(json.dumps(msgspec.to_builtins(found), indent=2))
        return
    from shardfold.explanation.explanation import as_text

    click.echo(as_text(found, everything))


def _is_plan(source: str) -> bool:
    return ":" not in source and Path(source).suffix == ".json"


def _check_usage(is_plan: bool, cluster: str | None, model: str | None, given: Options) -> None:
    """A plan knows its cluster and how it was made; a model does not."""
    if not is_plan:
        if cluster is None:
            raise click.UsageError("MODEL needs a --cluster; or give PLAN.json and its --model.")
        if model is not None:
            raise click.UsageError("--model goes with PLAN.json.")
        return
    if model is None:
        raise click.UsageError("PLAN.json needs its --model: a plan does not hold the tables.")
    wrong = ["cluster"] * (cluster is not None) + [n for n in given if n != "profile"]
    if wrong:
        name = {"pins": "pin"}.get(wrong[0], wrong[0]).replace("_", "-")
        raise click.UsageError(f"--{name} goes with MODEL: a plan knows how it was made.")


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

    from shardfold.cli.model import planner_for
    from shardfold.cli.plan import check_writable
    from shardfold.cli.printing import summary
    from shardfold.plans import load

    if save is not None:
        check_writable(Path(save))
    plan, changes = load(file), taken(options)
    target = None if cluster is None else checked(cluster, changes)
    with planner_for(model, options) as planner:
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
