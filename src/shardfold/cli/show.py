"""`shardfold show`: a saved plan, printed as when it was made, or checked against a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from shardfold.cli.options import output_options, size_options

if TYPE_CHECKING:
    from shardfold.plans import Plan

AS_IN_MODEL = "as in the model"  # what a plan says whose dtype was not given


@click.command()
@click.argument("file")
@click.option("--model", help="Check that the plan is for this MODEL (as in shardfold plan).")
@size_options
@output_options
def show(
    file: str, model: str | None, as_json: bool, everything: bool, **sizes: int | None
) -> None:
    r"""Print the plan in FILE; with --model, refuse it unless it is for that model.

    The options --batch, --seq, --layers and --hidden go with --model: a plan is for one size.

    \b
    shardfold show plan.json
    shardfold show plan.json --model gpt2 --json
    """
    from shardfold.cli.printing import emit, progress
    from shardfold.plans import load

    given = [name for name, size in sizes.items() if size is not None]
    if given and model is None:
        raise click.UsageError(f"--{given[0]} goes with --model.")
    plan = load(file)
    if model is not None:
        with progress():
            _check(plan, model, sizes)
    emit(plan, as_json=as_json, everything=everything, model=model)


def _check(plan: Plan, model: str, sizes: Mapping[str, int | None]) -> None:
    """Capture the model as it was for the plan, and compare."""
    from shardfold.cli.model import load_model
    from shardfold.cli.quiet import quiet
    from shardfold.plans import check
    from shardfold.plans.cutting import example_for

    with quiet():
        from shardfold.capture import capture

        example = load_model(model, sizes)
    dtype = None if plan.provenance.dtype == AS_IN_MODEL else plan.provenance.dtype
    with quiet(mute=True):
        part = example_for(plan, example.args, example.kwargs)
        graph = capture(example.module, *part, dtype=dtype)
    check(plan, graph)
