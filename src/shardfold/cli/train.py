"""`shardfold train`: a small real trainer under a plan."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import click

from shardfold.cli.options import size_options
from shardfold.cli.running import on_every_rank, real_model, run_options

if TYPE_CHECKING:
    from shardfold.plans import Plan
    from shardfold.run.train import StepReport

SHOWN = 10  # lines of progress, at most


@click.command()
@click.argument("model")
@run_options
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True)
@click.option("--lr", type=float, default=1e-3, show_default=True, help="Learning rate.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of dropout and new weights.")
@size_options
def train(
    model: str,
    plan_file: str,
    local: int | None,
    steps: int,
    lr: float,
    seed: int,
    **sizes: int | None,
) -> None:
    """Train MODEL under a plan, on a synthetic batch, with the plan's optimizer.

    MODEL is as in shardfold plan. The batch is the example that comes with it, repeated.
    """
    from shardfold.plans import load

    plan = load(plan_file)
    found = on_every_rank(_train, plan, local, plan, model, sizes, steps, lr, seed)
    if found is None:
        return
    reports, samples, tokens = found
    seconds = statistics.median([r.seconds for r in reports[1:] or reports])
    rate = (
        f"{samples / seconds:,.0f} samples/s"
        if tokens is None
        else f"{tokens / seconds:,.0f} tokens/s"
    )
    click.echo(
        f"{steps} steps: loss {reports[0].loss:.4f} -> {reports[-1].loss:.4f}, "
        f"{seconds * 1e3:.1f} ms a step (median), {rate}"
    )


def _train(
    rank: int,
    plan: Plan,
    model: str,
    sizes: dict[str, int | None],
    steps: int,
    lr: float,
    seed: int,
) -> tuple[list[StepReport], int, int | None]:
    from shardfold.cli.quiet import quiet
    from shardfold.run.train import Recipe, begin
    from shardfold.run.train import train as run

    example = real_model(model, sizes)
    every = max(1, steps // SHOWN)

    def show(report: StepReport) -> None:
        if rank == 0 and report.number % every == 0:
            click.echo(
                f"step {report.number:>5}  loss {report.loss:.4f}  {report.seconds * 1e3:.1f} ms",
                err=True,
            )

    batch = (example.args, example.kwargs)
    with quiet():
        state = begin(example.module, plan, batch, Recipe(lr=lr, seed=seed), example.rules)
        reports = run(state, lambda step: batch, steps=steps, watch=show)
    return reports, *_sizes([*example.args, *example.kwargs.values()])


def _sizes(values: list[Any]) -> tuple[int, int | None]:
    """Samples in the batch, and tokens where the first tensor holds whole numbers."""
    first = next((v for v in values if hasattr(v, "shape") and len(v.shape)), None)
    if first is None:
        return 1, None
    tokens = first.numel() if not first.is_floating_point() else None
    return int(first.shape[0]), tokens
