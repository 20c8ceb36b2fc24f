"""`shardfold train`: a small real trainer under a plan."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardfold.cli.options import size_options
from shardfold.cli.running import on_every_rank, real_model, run_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfold.cli.model import Example
    from shardfold.plans import Plan
    from shardfold.run.train import Batch, State, StepReport

SHOWN = 10  # lines of progress, at most
TERMINATED = 128 + 15  # as shells say of a process that SIGTERM ended


@click.command()
@click.argument("model")
@run_options
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True)
@click.option("--lr", type=float, default=1e-3, show_default=True, help="Learning rate.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of dropout and new weights.")
@click.option(
    "--checkpoints",
    type=click.Path(file_okay=False, path_type=Path),
    help="Save here, and go on from the last checkpoint here.",
)
@click.option("--save-every", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--keep", type=click.IntRange(min=1), default=3, show_default=True)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    help="Seconds after which a collective is given up, under torchrun.  [default: 120]",
)
@size_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def train(
    model: str,
    plan_file: str,
    local: int | None,
    steps: int,
    lr: float,
    seed: int,
    checkpoints: Path | None,
    save_every: int,
    keep: int,
    timeout: float | None,
    as_json: bool,
    **sizes: int | None,
) -> None:
    r"""Train MODEL under a plan, on a synthetic batch, with the plan's optimizer.

    MODEL is as in shardfold plan. The batch is the example that comes with it, repeated.

    With --checkpoints, training is saved as it goes, and on SIGTERM; started again, it goes on.
    Under torchrun with another number of processes than the plan is for, a new plan is made for
    those that are there.

    \b
    shardfold train gpt2-tiny --plan plan.json --local 2 --steps 20
    torchrun --nnodes 2:4 --max-restarts 9 -m shardfold train gpt2-tiny \
      --plan plan.json --checkpoints run
    """
    from shardfold.plans import load

    plan = load(plan_file)
    saving = None if checkpoints is None else (checkpoints, save_every, keep)
    given = (plan, model, sizes, steps, lr, seed, saving)
    found = on_every_rank(_train, plan, local, *given, wait_seconds=timeout)
    if found is None:
        return
    reports, samples, tokens = found
    if as_json:
        figures = {"steps": [asdict(r) for r in reports], "samples": samples, "tokens": tokens}
        click.echo(json.dumps(figures, indent=2))
        return
    if not reports:
        click.echo(f"{steps} steps were taken already: nothing to do.")
        return
    seconds = statistics.median([r.seconds for r in reports[1:] or reports])
    rate = (
        f"{samples / seconds:,.0f} samples/s"
        if tokens is None
        else f"{tokens / seconds:,.0f} tokens/s"
    )
    click.echo(
        f"{len(reports)} steps: loss {reports[0].loss:.4f} -> {reports[-1].loss:.4f}, "
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
    saving: tuple[Path, int, int] | None,
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
        if saving is not None:
            plan = _plan_for_all(rank, plan, example)
        state = begin(example.module, plan, batch, Recipe(lr=lr, seed=seed), example.rules)
        if saving is None:
            reports = run(state, lambda step: batch, steps=steps, watch=show)
        else:
            reports = _kept(rank, state, batch, steps, show, saving)
    return reports, *_sizes([*example.args, *example.kwargs.values()])


def _plan_for_all(rank: int, plan: Plan, example: Example) -> Plan:
    """The plan itself where it is for as many processes as there are; else a new one, by rank 0."""
    import os
    from math import prod

    import torch.distributed as dist

    from shardfold.plans.store import dumps, loads
    from shardfold.replan import replan
    from shardfold.run.checkpoint.together import on_first

    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == prod(axis.size for axis in plan.mesh):
        return plan
    within = int(os.environ.get("LOCAL_WORLD_SIZE", world))

    def made() -> bytes:
        found = replan(
            plan,
            example.module,
            example.args,
            example.kwargs,
            devices=world,
            within=within,
            rules=example.rules,
        )
        return dumps(found).encode()

    found = loads(on_first(made))
    if rank == 0:
        click.echo(f"Planned again for {world} processes: {found.cluster}.", err=True)
    return found


def _kept(
    rank: int,
    state: State,
    batch: Batch,
    steps: int,
    show: Callable[[StepReport], None],
    saving: tuple[Path, int, int],
) -> list[StepReport]:
    """Train from the last checkpoint on, saving; a request to end ends the process."""
    from shardfold.run.elastic import Saving, Stopped, listening, resume, saver
    from shardfold.run.train import train as run

    chosen = Saving(*saving)
    with listening() as request:
        found = resume(state, chosen)
        if found is not None and rank == 0:
            click.echo(f"Resumed after step {found.step} from {found.path}.", err=True)
        try:
            after = saver(chosen, request, steps)
            return run(state, lambda step: batch, steps=steps, watch=show, after=after)
        except Stopped as stopped:
            if rank == 0:
                click.echo(str(stopped), err=True)
            raise SystemExit(TERMINATED) from None


def _sizes(values: list[Any]) -> tuple[int, int | None]:
    """Samples in the batch, and tokens where the first tensor holds whole numbers."""
    first = next((v for v in values if hasattr(v, "shape") and len(v.shape)), None)
    if first is None:
        return 1, None
    tokens = first.numel() if not first.is_floating_point() else None
    return int(first.shape[0]), tokens
