"""`shardfold explain`: why a plan splits an operator as it does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardfold.cli.options import (
    DTYPES,
    output_options,
    pin_option,
    profile_option,
    size_in_bytes,
    size_options,
)

if TYPE_CHECKING:
    from shardfold.cli.model import Example
    from shardfold.plans import Plan

PLANNING = ("dtype", "optimizer", "mesh", "cost", "memory_limit", "pins")


@click.command()
@click.argument("source", metavar="MODEL|PLAN.json")
@click.argument("op", required=False)
@click.option("--cluster", help="Such as 8xa100, 4x8xh100 or lab.toml; with MODEL.")
@click.option("--model", help="The MODEL of PLAN.json.")
@size_options
@click.option("--dtype", type=click.Choice(DTYPES), help="Of weights and activations.")
@click.option("--optimizer", help="sgd, momentum, adam or adamw, the default.")
@click.option("--mesh", help="Such as 8x4. Every mesh is tried if left out.")
@click.option("--cost", help="roofline, the default, or paper.")
@profile_option
@click.option("--memory-limit", type=size_in_bytes, metavar="SIZE", help="Per device.")
@pin_option
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
    profile: str | None,
    seconds: float,
    as_json: bool,
    everything: bool,
    **options: Any,
) -> None:
    r"""Explain the split of the operators that match OP: what any other split would cost.

    OP is a module's path, with * and ?, or an operator's name; without it the slowest operators
    are explained. Every other split is priced with everything else chosen anew around it. Where OP
    is given, faster or slower links, more memory and other batches are tried, too, for --seconds.

    \b
    shardfold explain gpt2-tiny --cluster 2x2xh100 'transformer.h.0.mlp.*'
    shardfold explain plan.json --model gpt2-tiny lm_head
    """
    from shardfold.cli.model import load_model
    from shardfold.cli.printing import progress, quiet
    from shardfold.costs.profile.profile import load as load_profile
    from shardfold.questions import explain as find_reasons

    planning = {name: options.pop(name) for name in PLANNING}
    given = {name: value for name, value in planning.items() if value not in (None, ())}
    is_plan = _is_plan(source)
    _check_usage(is_plan, cluster, model, given)
    measured = None if profile is None else load_profile(profile)
    with progress() as watch:
        plan = _load(source) if is_plan else None
        with quiet():
            example = load_model(model or source, options)
        with quiet(mute=True):
            if plan is None:
                plan = _planned(example, cluster, {**given, "profile": measured}, watch)
            found = find_reasons(
                example.module,
                example.args,
                example.kwargs,
                plan=plan,
                profile=measured,
                op=op,
                everything=everything,
                seconds=0.0 if op is None or everything else seconds,
                rules=example.rules,
                watch=watch,
            )
    if as_json:
        import json

        import msgspec

        click.echo(json.dumps(msgspec.to_builtins(found), indent=2))
        return
    from shardfold.explanation.text import as_text

    click.echo(as_text(found, everything))


def _is_plan(source: str) -> bool:
    return ":" not in source and Path(source).suffix == ".json"


def _check_usage(
    is_plan: bool, cluster: str | None, model: str | None, given: dict[str, Any]
) -> None:
    """A plan knows its cluster and how it was made; a model does not."""
    if not is_plan:
        if cluster is None:
            raise click.UsageError("MODEL needs a --cluster; or give PLAN.json and its --model.")
        if model is not None:
            raise click.UsageError("--model goes with PLAN.json.")
        return
    if model is None:
        raise click.UsageError("PLAN.json needs its --model: a plan does not hold the tables.")
    wrong = ["cluster"] * (cluster is not None) + list(given)
    if wrong:
        name = {"pins": "pin"}.get(wrong[0], wrong[0]).replace("_", "-")
        raise click.UsageError(f"--{name} goes with MODEL: a plan knows how it was made.")


def _load(path: str) -> Plan:
    from shardfold.plans import load

    return load(path)


def _planned(example: Example, cluster: str | None, given: dict[str, Any], watch: Any) -> Plan:
    from shardfold.api import plan

    assert cluster is not None
    return plan(
        example.module,
        example.args,
        example.kwargs,
        cluster=cluster,
        rules=example.rules,
        watch=watch,
        **given,
    )
