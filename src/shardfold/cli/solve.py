"""`shardfold solve`: read a search problem from a file, solve it, and print what was proven."""

from __future__ import annotations

import json
from pathlib import Path

import click

from shardfold.cli.options import size_in_bytes
from shardfold.search import METHODS, ORDERS, Problem, Solution, read_problem
from shardfold.search import solve as search

_SHOWN = 20


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--method",
    type=click.Choice(METHODS),
    default="exact",
    show_default=True,
    help="How to search. All but 'exact' are there for comparison.",
)
@click.option(
    "--order",
    type=click.Choice(ORDERS),
    default="auto",
    show_default=True,
    help="Elimination order of the exact search; 'auto' folds repeats and picks the cheapest.",
)
@click.option(
    "--memory-limit",
    type=size_in_bytes,
    metavar="SIZE",
    help="Largest total of the choices' bytes, such as 64GiB.",
)
@click.option(
    "--table-limit",
    type=size_in_bytes,
    metavar="SIZE",
    default="1GiB",
    show_default=True,
    help="What the search's own tables may hold; with less it proves by bounds instead.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="When tables do not fit: how long to go on, in processor time, before the gap is stated.",
)
@click.option("--all", "show_all", is_flag=True, help="Print the choice of every vertex.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def solve(
    file: Path,
    method: str,
    order: str,
    memory_limit: float | None,
    table_limit: float,
    seconds: float,
    show_all: bool,
    as_json: bool,
) -> None:
    """Solve a search problem FILE (.npz): one choice per vertex at the least total cost.

    A plan's problem is written by `shardfold plan ... --save-problem FILE`; the format is in the
    documentation under "search". The answer says whether it is proven optimal, and the lower bound
    that proves it.

    \b
    Examples:
      shardfold solve gpt2.npz
      shardfold solve gpt2.npz --memory-limit 40GiB --json
      shardfold solve gpt2.npz --order generate-seq   # as in the PaSE paper
      shardfold solve gpt2.npz --method ilp           # by integer programming
    """  # noqa: D301 (click reads the backspace as "do not rewrap")
    problem = read_problem(file)
    solution = search(
        problem,
        method=method,
        order=order,
        memory_limit=memory_limit,
        table_bytes=table_limit,
        seconds=seconds,
    )
    if as_json:
        click.echo(json.dumps(facts(solution), indent=2))
    else:
        _print(problem, solution, len(problem) if show_all else _SHOWN)


def facts(solution: Solution) -> dict[str, object]:
    """The solution as plain values, for JSON."""
    statistics = solution.statistics
    return {
        "cost": solution.cost,
        "optimal": solution.is_optimal,
        "lower_bound": None if solution.lower_bound == -float("inf") else solution.lower_bound,
        "gap": None if solution.lower_bound == -float("inf") else solution.gap,
        "bytes": solution.bytes,
        "seconds": statistics.seconds,
        "largest_table": statistics.largest_table,
        "peak_bytes": statistics.peak_bytes,
        "method": statistics.method,
        "order": statistics.order,
        "choice": list(solution.choice),
    }


def _print(problem: Problem, solution: Solution, shown: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    grid = Table.grid(padding=(0, 2))
    for name, value in _lines(solution):
        grid.add_row(name, value)
    console.print(grid)
    table = Table("vertex", "name", "choice", "of", "cost", box=None)
    for vertex in range(min(shown, len(problem))):
        x = solution.choice[vertex]
        name = problem.names[vertex] if problem.names else ""
        cost = f"{problem.costs[vertex][x]:.6g}"
        table.add_row(str(vertex), name, str(x), str(problem.sizes[vertex]), cost)
    console.print()
    console.print(table)
    if shown < len(problem):
        console.print(f"... and {len(problem) - shown} more; --all shows them.")


def _lines(solution: Solution) -> list[tuple[str, str]]:
    statistics = solution.statistics
    if solution.is_optimal:
        proof = "yes"
    elif solution.lower_bound == -float("inf"):
        proof = "no: this method proves nothing"
    else:
        proof = f"no: at most {solution.gap:.3%} above the optimum"
    lines = [
        ("cost", f"{solution.cost:.12g}"),
        ("proven optimal", proof),
        ("lower bound", f"{solution.lower_bound:.12g}"),
        ("seconds", f"{statistics.seconds:.4f}"),
        ("largest table", f"{statistics.largest_table:,} entries"),
        ("peak memory", f"{statistics.peak_bytes / 2**20:.2f} MiB of tables"),
        ("method, order", f"{statistics.method}, {statistics.order}"),
    ]
    if solution.bytes is not None:
        lines.insert(3, ("bytes", f"{solution.bytes:,.0f}"))
    return lines
