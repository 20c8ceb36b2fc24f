"""Predictions beside published runs: every row of a CSV, priced as it states itself.

Each row's model is built from its dims, its configuration priced on its hardware, as the stack
that ran it keeps and sends things. Nothing is fitted to a row. Rows that cannot be stated are left
out, with the reason.

    python benchmarks/published.py RUNS.csv --out benchmarks/results/published.json --page
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from environment import environment
from published_rows import RowError, chosen, read_rows
from published_summary import Errors, Priced, Summary, by_source, summarise

PAGE = Path(__file__).parent.parent / "docs" / "results" / "published.md"


@click.command()
@click.argument("runs", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Write every row to a JSON file.")
@click.option("--rows", "numbers", default="", metavar="A:B", help="Only these rows, from 1.")
@click.option("--source", default="", metavar="TEXT", help="Only sources with this text.")
@click.option("--cost", default="", metavar="NAME", help="The cost model; else the planner's.")
@click.option("--page", is_flag=True, help="Write docs/results/published.md.")
def main(runs: Path, out: Path | None, numbers: str, source: str, cost: str, page: bool) -> None:
    """Price the rows of RUNS, and print what the predictions are worth, by source."""
    from published_price import DEFAULT_COST, price

    begun, around = time.monotonic(), environment()
    try:
        rows = list(chosen(read_rows(runs), numbers, source))
    except RowError as error:
        raise click.ClickException(str(error)) from None
    found: list[Priced] = []
    with click.progressbar(rows, label="Pricing", file=sys.stderr) as shown:
        for row in shown:
            found.append(price(row, cost or DEFAULT_COST))
    whole = {
        "environment": around,
        "cost": cost or DEFAULT_COST,
        "seconds": time.monotonic() - begun,
        "sources": {name: summary.as_plain() for name, summary in summaries(found).items()},
        "rows": found,
    }
    if out is not None:
        out.write_text(in_lines(whole))
    if page:
        from published_page import page as written

        PAGE.write_text(written(whole))
    for name, summary in summaries(found).items():
        click.echo("\n".join(lines(name, summary)) + "\n")


def in_lines(whole: dict[str, Any]) -> str:
    """JSON with a line for each row."""
    rows = ",\n".join(json.dumps(row) for row in whole["rows"])
    head = json.dumps({name: value for name, value in whole.items() if name != "rows"}, indent=1)
    return head.removesuffix("\n}") + f',\n "rows": [\n{rows}\n]}}\n'


def summaries(rows: list[Priced]) -> dict[str, Summary]:
    """By source, and of all."""
    from published_setups import named

    found = {name: summarise(each) for name, each in by_source(rows, named).items()}
    return {**found, "All sources": summarise(rows)}


def lines(name: str, found: Summary) -> Iterator[str]:
    """One source's figures as text."""
    yield f"{name}: {found.priced} of {found.rows} rows priced"
    for reason, count in found.left_out.items():
        yield f"  left out {count:4d}  {reason}"
    for what, each in (("step", found.step), ("memory", found.memory)):
        if each is not None:
            yield f"  {what:7s} {_errors(each)}"
    if found.ran:
        yield f"  fits    {found.ran_and_fit} of {found.ran} that ran are predicted to fit"
    if found.failed:
        yield f"          {found.foretold} of {found.failed} that failed are predicted not to"
    if found.kendall is not None and found.regret is not None:
        yield (
            f"  ranking Kendall {found.kendall:.2f}, regret {found.regret:.1%} in the median of "
            f"{found.groups} groups"
        )


def _errors(found: Errors) -> str:
    return (
        f"{found.rows} rows, |error| {found.median:.1%} in the median, {found.percentile90:.1%} at "
        f"the 90th percentile; {found.within10:.0%} within 10%, {found.within20:.0%} within 20%; "
        f"median {found.bias:+.1%}"
    )


if __name__ == "__main__":
    main()
