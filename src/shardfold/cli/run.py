"""`shardfold check` and `shardfold train`: what runs a model under a plan.

Both share the plan, the processes, and the model on each of them. `check` compares two steps with
the plain module on one device; `train` is a small real trainer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shardfold.cli.options import size_options
from shardfold.errors import RunError

if TYPE_CHECKING:
    from shardfold.cli.model import Example
    from shardfold.planner.options import Options
    from shardfold.plans import Plan
    from shardfold.runtime.check import Comparison
    from shardfold.runtime.training import Data, Figures, State, StepReport


Function = TypeVar("Function", bound=Callable[..., Any])


def run_options(command: Function) -> Function:
    """Add the options that say what is run, and where."""
    command = click.option(
        "--local", type=click.IntRange(min=1), help="Start so many processes here."
    )(command)
    return click.option("--plan", "plan_file", required=True, help="A plan saved by plan --save.")(
        command
    )


def processes_of(plan: Plan, local: int | None) -> int:
    """How many processes to start; as many as the plan is for."""
    size = plan.processes
    if local is not None and local != size:
        raise RunError(f"The plan is for {size} processes, not --local {local}.")
    if local is None and size > 1:
        raise RunError(
            f"The plan is for {size} processes: start them here with --local {size}, or with "
            f"torchrun --nproc-per-node {size} -m shardfold ..."
        )
    return size


def on_every_rank(
    function: Callable[..., Any],
    plan: Plan,
    local: int | None,
    *args: Any,
    wait_seconds: float | None = None,
) -> Any | None:
    """Rank 0's result of `function(rank, *args)`; None on the other ranks of torchrun."""
    from datetime import timedelta

    from shardfold.runtime.ranks import WAIT, is_started, joined, launch

    if local is None and is_started():
        wait = WAIT if wait_seconds is None else timedelta(seconds=wait_seconds)
        with joined(wait) as (rank, _):
            found = function(rank, *args)
            return found if rank == 0 else None
    return launch(function, processes_of(plan, local), *args)[0]


def real_model(text: str, sizes: Mapping[str, int | None]) -> Example:
    """The model with weights and a batch that have data."""
    from shardfold.cli.model import load_model
    from shardfold.cli.printing import quiet

    with quiet():
        return load_model(text, sizes, device="cpu")


@click.command()
@click.argument("model")
@run_options
@size_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(
    model: str, plan_file: str, local: int | None, as_json: bool, **sizes: int | None
) -> None:
    r"""Run two training steps of MODEL under a plan and in plain PyTorch, and compare.

    The module itself, its captured program on one device and the plan's splits run the same two
    batches in float64. Loss, every operator's result, every gradient and buffer must agree. If
    they do not, what differs first is named, and the exit code is 1. MODEL is as in shardfold
    plan.

    \b
    shardfold check gpt2-tiny --plan plan.json --local 2
    """
    from shardfold.plans import load

    plan = load(plan_file)
    found = on_every_rank(_compare, plan, local, plan, model, sizes)
    if found is None:
        return
    if as_json:
        click.echo(json.dumps({"equal": found.is_equal, **asdict(found)}, indent=2))
    else:
        click.echo(str(found))
    if not found.is_equal:
        raise click.exceptions.Exit(1)


def _compare(rank: int, plan: Plan, model: str, sizes: dict[str, int | None]) -> Comparison:
    from shardfold.cli.printing import quiet
    from shardfold.runtime.check import compare
    from shardfold.runtime.training import check_data

    example = real_model(model, sizes)
    check_data(example.args, example.kwargs)
    with quiet():
        return compare(example.module, plan, example.args, example.kwargs, rules=example.rules)


FIRST, SHARES, SILENCE_SECONDS = 10, 20, 10.0  # when a line of progress is due: see `_shown`
PATIENCE_MINUTES = 60  # for a new plan: a large model on many devices may take its time
TERMINATED = 128 + 15  # as shells say of a process that SIGTERM ended


HELP = """Train MODEL under a plan, with the plan's optimizer.

MODEL is as in shardfold plan. Without --data, the example batch that comes with the model is
repeated. Start it with --local, or with torchrun.

With --checkpoints, training is saved as it goes, and on SIGTERM; started again, it goes on. Under
torchrun with another number of processes than the plan is for, a new plan is made for those that
are there.

\b
shardfold train gpt2-tiny --plan plan.json --local 2 --data book.txt --steps 200
torchrun --nnodes 2:4 --max-restarts 9 -m shardfold train gpt2-tiny \\
    --plan plan.json --checkpoints run
"""


@dataclass(frozen=True, slots=True)
class Wish:
    """What was asked for: the model and its sizes, how long, on what, and how."""

    model: str
    sizes: dict[str, int | None]
    steps: int
    data: str | None
    lr: float
    warmup: int
    clip: float | None
    seed: int
    saving: tuple[Path, int, int] | None
    profile: str | None


@click.command(help=HELP)
@click.argument("model")
@run_options
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True)
@click.option("--data", metavar="FILE.txt", help="Train on the bytes of a text, as tokens.")
@click.option("--lr", type=float, default=1e-3, show_default=True, help="Learning rate.")
@click.option("--warmup", type=click.IntRange(min=0), default=0, help="Steps to reach it in.")
@click.option("--clip", type=float, help="Largest norm of all gradients together.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of dropout, data, weights.")
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
@click.option(
    "--profile",
    type=click.Path(dir_okay=False),
    metavar="FILE.json",
    help="The profile of the plan's prices, to plan again where its file has moved.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@size_options
def train(
    model: str,
    plan_file: str,
    local: int | None,
    steps: int,
    data: str | None,
    lr: float,
    warmup: int,
    clip: float | None,
    seed: int,
    checkpoints: Path | None,
    save_every: int,
    keep: int,
    timeout: float | None,
    profile: str | None,
    as_json: bool,
    **sizes: int | None,
) -> None:
    """Train a model under a plan."""
    from shardfold.plans import load

    plan = load(plan_file)
    saving = None if checkpoints is None else (checkpoints, save_every, keep)
    wish = Wish(model, sizes, steps, data, lr, warmup, clip, seed, saving, profile)
    told = on_every_rank(_train, plan, local, plan, wish, wait_seconds=timeout)
    if told is None:
        return
    reports, found = told
    if as_json:
        each = {"steps": [asdict(report) for report in reports]}
        click.echo(json.dumps({**(asdict(found) if found else {}), **each}, indent=2))
    else:
        click.echo(found or f"{steps} steps were taken already: nothing to do.")


def _train(rank: int, plan: Plan, wish: Wish) -> tuple[list[StepReport], Figures | None]:
    from shardfold.cli.printing import quiet
    from shardfold.runtime.training import Recipe, begin, figures, repeated, text
    from shardfold.runtime.training import train as run

    example = real_model(wish.model, wish.sizes)
    batch = (example.args, example.kwargs)
    show = _shown(rank, wish.steps)
    with quiet():
        data = repeated(batch)
        if wish.data is not None:
            data = text(wish.data, example.module, batch, wish.seed)
        if wish.saving is not None:
            plan = _plan_for_all(rank, plan, example, wish.profile)
        recipe = Recipe(wish.lr, wish.warmup, wish.clip, wish.seed)
        state = begin(example.module, plan, batch, recipe, example.rules)
        if wish.saving is None:
            reports = run(state, data, steps=wish.steps, clip=wish.clip, watch=show)
        else:
            reports = _kept(rank, state, data, wish, show, wish.saving)
    graph = state.module._run.program.graph
    return reports, figures(plan, graph, reports, batch) if reports else None


def _shown(
    rank: int, steps: int, clock: Callable[[], float] = time.monotonic
) -> Callable[[StepReport], None]:
    """Rank 0's lines: the first ten steps, the last, every twentieth part, and every 10 s."""
    every, said = max(1, steps // SHARES), clock()

    def show(report: StepReport) -> None:
        nonlocal said
        number, now = report.number, clock()
        is_due = number < FIRST or number % every == 0 or number == steps - 1
        if rank == 0 and (is_due or now - said >= SILENCE_SECONDS):
            said = now
            click.echo(
                f"step {report.number:>5}  loss {report.loss:.4f}  {report.seconds * 1e3:.1f} ms",
                err=True,
            )

    return show


def _plan_for_all(rank: int, plan: Plan, example: Example, profile: str | None) -> Plan:
    """The plan itself where it is for as many processes as there are; else a new one, by rank 0."""
    import os
    from datetime import timedelta

    import torch.distributed as dist

    from shardfold.api import Planner
    from shardfold.plans.files import dumps, loads
    from shardfold.runtime.checkpoint.folders import on_first

    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == plan.processes:
        return plan
    within = int(os.environ.get("LOCAL_WORLD_SIZE", world))

    def made() -> bytes:
        planner = Planner(example.module, example.args, example.kwargs, rules=example.rules)
        given: Options = {} if profile is None else {"profile": profile}
        return dumps(planner.replan(plan, devices=world, within=within, **given)).encode()

    found = loads(on_first(made, timedelta(minutes=PATIENCE_MINUTES)))
    if rank == 0:
        click.echo(f"Planned again for {world} processes: {found.cluster}.", err=True)
    return found


def _kept(
    rank: int,
    state: State,
    data: Data,
    wish: Wish,
    show: Callable[[StepReport], None],
    saving: tuple[Path, int, int],
) -> list[StepReport]:
    """Train from the last checkpoint on, saving; a request to end ends the process."""
    from shardfold.runtime.training import Saving, Stopped, listening, resume, saver
    from shardfold.runtime.training import train as run

    chosen = Saving(*saving)
    with listening() as request:
        found = resume(state, chosen)
        if found is not None and rank == 0:
            click.echo(f"Resumed after step {found.step} from {found.path}.", err=True)
        try:
            after = saver(chosen, request, wish.steps)
            return run(state, data, steps=wish.steps, clip=wish.clip, watch=show, after=after)
        except Stopped as stopped:
            if rank == 0:
                click.echo(str(stopped), err=True)
            raise SystemExit(TERMINATED) from None
