"""`shardfold report`: a saved plan as one HTML page that opens anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardfold.cli.options import size_options

if TYPE_CHECKING:
    from shardfold.plans import Plan
    from shardfold.plans.explanation import Explanation

OWN = ("plan", "exact")  # methods of a comparison that the report has already


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
    from shardfold.report.page import to_html

    given = [name for name, size in sizes.items() if size is not None]
    if model is None and (given or explained is not None):
        raise click.UsageError(f"--{given[0] if given else 'explain'} goes with --model.")
    target = Path(output) if output is not None else Path(file).with_suffix(".html")
    if not as_json:
        check_writable(target)
    plan = load(file)
    found = None if model is None else _explained(plan, model, sizes, explained)
    is_simulated = plan.simulation is not None
    rivals = [] if comparison is None else _rivals(comparison, is_simulated)
    if as_json:
        from shardfold.report.facts import facts

        name = title or f"{model or 'A plan'} on {plan.cluster}"
        click.echo(json.dumps(facts(plan, name, explanation=found, rivals=rivals, model=model)))
        return
    page = to_html(plan, title=title, explanation=found, rivals=rivals, model=model)
    target.write_text(page, encoding="utf-8")
    click.echo(f"Written to {target} ({len(page) / 2**10:,.0f} KiB)")


def _explained(
    plan: Plan, model: str, sizes: Mapping[str, int | None], pattern: str | None
) -> Explanation:
    """The runner-ups of the operators that match, or of the slowest."""
    from shardfold.cli.model import load_model
    from shardfold.cli.printing import progress
    from shardfold.cli.quiet import quiet
    from shardfold.questions import explain

    with progress() as watch:
        with quiet():
            example = load_model(model, sizes)
        with quiet(mute=True):
            return explain(
                example.module,
                example.args,
                example.kwargs,
                plan=plan,
                op=pattern,
                rules=example.rules,
                watch=watch,
            )


def _rivals(path: str, is_simulated: bool) -> list[dict[str, Any]]:
    """The methods of a comparison that have the figure by which the plan was chosen."""
    from shardfold.errors import PlanError

    try:
        results = json.loads(Path(path).read_text(encoding="utf-8"))["results"]
        figure = "simulated_seconds" if is_simulated else "step_seconds"
        return [
            {
                "name": entry["method"].replace("-", " "),
                "seconds": entry[figure],
                "bytes": entry["peak_bytes"],
            }
            for entry in results
            if entry[figure] is not None and entry["method"] not in OWN
        ]
    except OSError as error:
        raise PlanError(f"Cannot read the comparison {path}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(
            f"{path} is not what shardfold compare MODEL --cluster C --json prints."
        ) from error
