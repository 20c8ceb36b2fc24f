"""`shardfold show`: a saved plan, printed as when it was made, or checked against a model."""

from __future__ import annotations

import click

from shardfold.cli.options import output_options, size_options

AS_IN_MODEL = "as in the model"  # what a plan says whose dtype was not given


@click.command()
@click.argument("file")
@click.option("--model", help="Check that the plan is for this MODEL (as in shardfold plan).")
@size_options
@output_options
def show(
    file: str, model: str | None, as_json: bool, everything: bool, **sizes: int | None
) -> None:
    """Print the plan in FILE; with --model, refuse it unless it is for that model.

    The options --batch, --seq, --layers and --hidden go with --model: a plan is for one size.
    """
    from shardfold.cli.printing import emit, progress
    from shardfold.plans import check, load

    given = [name for name, size in sizes.items() if size is not None]
    if given and model is None:
        raise click.UsageError(f"--{given[0]} goes with --model.")
    plan = load(file)
    if model is not None:
        from shardfold.cli.model import load_model
        from shardfold.cli.quiet import quiet

        with quiet(), progress():
            from shardfold.capture import capture

            example = load_model(model, sizes)
            dtype = plan.provenance.dtype
            graph = capture(
                example.module,
                example.args,
                example.kwargs,
                dtype=None if dtype == AS_IN_MODEL else dtype,
            )
        check(plan, graph)
    emit(plan, as_json=as_json, everything=everything, model=model)
