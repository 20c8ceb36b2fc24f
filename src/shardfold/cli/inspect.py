"""`shardfold show`: a saved plan, printed as when it was made, or checked against a model.

`shardfold report`: a saved plan as one HTML page that opens anywhere.

`shardfold simulate`: the step of a saved plan in time, on the streams of one device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardfold.cli.options import output_options, size_options
from shardfold.errors import PlanError

if TYPE_CHECKING:
    from shardfold.explanation.explanation import Explanation
    from shardfold.plans import Plan


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
    from shardfold.cli.printing import quiet
    from shardfold.plans import check
    from shardfold.plans.batch import example_for

    with quiet():
        from shardfold.capture import capture

        example = load_model(model, sizes)
    with quiet(mute=True):
        part = example_for(plan, example.args, example.kwargs)
        graph = capture(example.module, *part, dtype=plan.provenance.request.numbers)
    check(plan, graph)


OWN = ("selected", "additive-optimum")  # methods of a comparison that the report has already


@click.command()
@click.argument("file", metavar="PLAN.json")
@click.option(
    "-o", "--output", metavar="FILE.html", help="Where to write; PLAN.html beside the plan."
)
@click.option("--model", help="The MODEL of the plan (as in shardfold plan): adds runner-ups.")
@size_options
@click.option(
    "--explain",
    "explained",
    metavar="OP",
    help="With --model: which operators have their runner-up found; the slowest if left out.",
)
@click.option(
    "--compare",
    "comparison",
    metavar="FILE.json",
    help="What shardfold compare --json printed: more to hold the plan against.",
)
@click.option("--title", help="The page's title.")
@click.option("--json", "as_json", is_flag=True, help="Print the page's data, write nothing.")
def report(
    file: str,
    output: str | None,
    model: str | None,
    explained: str | None,
    comparison: str | None,
    title: str | None,
    as_json: bool,
    **sizes: int | None,
) -> None:
    r"""Write a report of the plan in FILE: one HTML page with everything inside it.

    It shows the model as a graph of blocks that open into operators, the splits, layouts and
    collectives of each, the step in time, memory, the mesh and the alternatives. It needs no
    network and no other file. With --model, the slowest operators' other splits are priced.

    \b
    shardfold report plan.json -o report.html
    shardfold report plan.json --model gpt2 --explain 'transformer.h.0.*'
    """
    from shardfold.cli.plan import check_writable
    from shardfold.plans import load
    from shardfold.report.html import to_html

    given = [name for name, size in sizes.items() if size is not None]
    if model is None and (given or explained is not None):
        raise click.UsageError(f"--{given[0] if given else 'explain'} goes with --model.")
    target = Path(output) if output is not None else Path(file).with_suffix(".html")
    if not as_json:
        check_writable(target)
    plan = load(file)
    found = None if model is None else _explained(plan, model, sizes, explained)
    rivals = [] if comparison is None else _rivals(comparison)
    if as_json:
        from shardfold.report.html import facts, titled

        name = title or titled(plan, model)
        click.echo(json.dumps(facts(plan, name, explanation=found, rivals=rivals, model=model)))
        return
    page = to_html(plan, title=title, explanation=found, rivals=rivals, model=model)
    target.write_text(page, encoding="utf-8")
    click.echo(f"Written to {target} ({len(page) / 2**10:,.0f} KiB)")


def _explained(
    plan: Plan, model: str, sizes: Mapping[str, int | None], pattern: str | None
) -> Explanation:
    """The runner-ups of the operators that match, or of the slowest."""
    from shardfold.cli.model import planner_for

    with planner_for(model, sizes) as planner:
        return planner.explain(plan, op=pattern)


def _rivals(path: str) -> list[dict[str, Any]]:
    """The methods of a comparison that came to something."""
    from shardfold.errors import PlanError

    try:
        results = json.loads(Path(path).read_text(encoding="utf-8"))["results"]
        if any("simulated_seconds" in entry for entry in results):
            raise PlanError(
                f"{path} is of an older shardfold, whose step_seconds is now additive_seconds. "
                "Compare again."
            )
        return [
            {
                "name": entry["method"],
                "seconds": entry["step_seconds"],
                "bytes": entry["peak_bytes"],
                "recomputes": False,
            }
            for entry in results
            if entry["step_seconds"] is not None and entry["method"] not in OWN
        ]
    except OSError as error:
        raise PlanError(f"Cannot read the comparison {path}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(
            f"{path} is not what shardfold compare MODEL --cluster C --json prints."
        ) from error


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
    the same, so one is simulated, whatever their number; of a pipeline, one of each stage.

    \b
    shardfold plan gpt2 --cluster 8xa100 --save plan.json
    shardfold simulate plan.json --trace trace.json
    """
    from shardfold.plans import load
    from shardfold.plans.drawing_data import stage_timeline
    from shardfold.simulate import simulate as figures
    from shardfold.simulate import timeline
    from shardfold.simulate.perfetto import write_trace

    if trace is not None and not Path(trace).parent.is_dir():
        raise PlanError(f"Cannot write {trace}: the folder {Path(trace).parent} does not exist.")
    plan = load(file)
    if plan.pipeline is not None and plan.simulation is not None:
        found = plan.simulation
        if trace is not None:
            write_trace(stage_timeline(plan), trace, f"the stages on {plan.cluster}")
    elif plan.schedule is None:
        raise PlanError(f"{file} holds no schedule: an older shardfold made it. Plan again.")
    elif trace is None:
        found = figures(plan.schedule)
    else:
        found, over_time = timeline(plan.schedule)
        write_trace(over_time, trace, f"one of {plan.cluster}")
    if as_json:
        click.echo(json.dumps(_plain(found, plan.estimate.limit_bytes), indent=2))
        return
    from rich.console import Console

    from shardfold.cli.printing import WIDEST
    from shardfold.report.terminal import simulation_view

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
