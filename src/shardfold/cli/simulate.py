"""`shardfold simulate`: the step of a saved plan in time, on the streams of one device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from shardfold.errors import PlanError


@click.command()
@click.argument("file", metavar="PLAN.json")
@click.option(
    "--trace",
    type=click.Path(dir_okay=False),
    metavar="FILE.json",
    help="Write a trace for chrome://tracing or ui.perfetto.dev.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def simulate(file: str, trace: str | None, as_json: bool) -> None:
    r"""Simulate one step of the plan in PLAN.json: time with overlap, memory, utilisation.

    Nothing but the plan is needed: neither the model nor the cluster. All devices of a plan do
    the same, so one is simulated, whatever their number.

    \b
    shardfold plan gpt2 --cluster 8xa100 --save plan.json
    shardfold simulate plan.json --trace trace.json
    """
    from shardfold.plans import load
    from shardfold.simulate import simulate as figures
    from shardfold.simulate import timeline
    from shardfold.simulate.trace import write_trace

    if trace is not None and not Path(trace).parent.is_dir():
        raise PlanError(f"Cannot write {trace}: the folder {Path(trace).parent} does not exist.")
    plan = load(file)
    if plan.schedule is None:
        raise PlanError(f"{file} holds no schedule: an older shardfold made it. Plan again.")
    if trace is None:
        found = figures(plan.schedule)
    else:
        found, over_time = timeline(plan.schedule)
        write_trace(over_time, trace, f"one of {plan.cluster}")
    if as_json:
        click.echo(json.dumps(_plain(found, plan.estimate.limit_bytes), indent=2))
        return
    from rich.console import Console

    from shardfold.cli.printing import WIDEST
    from shardfold.report.simulation import simulation_view

    console = Console(highlight=False)
    shape = "x".join(str(axis.size) for axis in plan.mesh) or "1"
    parts = f", {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
    title = f"{Path(file).name} on {plan.cluster}, mesh {shape}{parts}"
    view = simulation_view(found, title, plan.estimate.limit_bytes)
    console.print(view, width=min(console.width, WIDEST))
    if trace is not None:
        click.echo(f"Trace in {trace}")


def _plain(found: Any, limit_bytes: float) -> dict[str, Any]:
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(found)
    fits = found.peak_bytes <= limit_bytes
    return {**plain, "limit_bytes": limit_bytes, "fits": fits}
