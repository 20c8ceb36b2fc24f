"""A plan as a table for the terminal: colours, and columns that fit its width.

A simulated step as a table for the terminal: time per stream, collectives, memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from shardfold.plans import Plan
from shardfold.report import summary_text
from shardfold.report.plan_table import (
    Block,
    Row,
    kind_words,
    label,
    main_traffic,
    shown,
    times,
    traffic_words,
)
from shardfold.report.units import seconds, size
from shardfold.simulate import Simulation

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

WIDTH = 80
NAME, SPLIT, SHARE = 18, 17, 6  # the narrowest names, the widest split, the share
HOT = 0.1  # rows of at least this share of the step stand out
LEGEND = (
    "fwd, bwd: in the forward or backward pass, with bytes per operator and device. "
    "reduce: all-reduce; gather: all-gather; scatter: reduce-scatter; swap: all-to-all."
)
LEFT_OUT = " Collectives of under 5% of their row are left out (--all shows them)."


def plan_view(
    plan: Plan, *, model: str | None = None, everything: bool = False, width: int = WIDTH
) -> Group:
    """The whole plan, ready to print on a terminal of that width."""
    from rich.console import Group
    from rich.text import Text

    title, facts = summary_text.heading(plan, model)
    legend = "" if everything else LEFT_OUT
    return Group(
        Text(title, style="bold"),
        Text(facts),
        "",
        _operators(plan, everything, width),
        Text(LEGEND + legend, style="dim"),
        "",
        _rivals(plan),
        "",
        Text(f"Step: {summary_text.parts(plan)}; {summary_text.proof(plan)}."),
        *(Text(line) for line in summary_text.simulated(plan)),
        *(Text(line) for line in summary_text.recomputed(plan)),
        *(Text(line) for line in summary_text.accumulated(plan)),
        *(Text(line, style="red") for line in summary_text.too_large(plan)),
        *(Text(line) for line in summary_text.pinned(plan)),
        Text(summary_text.meshes(plan)),
        *(Text(line, style=_alarm(line)) for line in summary_text.unsplit(plan)),
        *(Text(note, style="dim") for note in plan.provenance.notes),
        Text(summary_text.effort(plan), style="dim"),
    )


def _alarm(line: str) -> str:
    return "yellow" if line.startswith("No rule") else ""


def _operators(plan: Plan, everything: bool, width: int) -> Table:
    from rich import box
    from rich.table import Table

    view = shown(plan, everything)
    rows = [row for block in view.blocks for row in block.rows]
    traffic = _widest(
        line for row in rows for line in _traffic(row, plan, everything).plain.split("\n")
    )
    split = min(_widest(row.split for row in rows), SPLIT)
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column(
        "operator", width=max(width - traffic - split - SHARE - 3, NAME), overflow="fold"
    )
    table.add_column("split", width=split)
    table.add_column("collectives", width=traffic)
    table.add_column("step", justify="right", width=SHARE)
    for block in view.blocks:
        _add_block(table, block, plan, everything)
    if view.left_out:
        table.add_row(
            f"{view.left_out} small operators", "", "", _share(view.left_out_seconds, plan)
        )
    return table


def _widest(cells: Iterable[str]) -> int:
    """The widest cell of a column, or its heading."""
    return max([len("collectives"), *map(len, cells)])


def _add_block(table: Table, block: Block, plan: Plan, everything: bool) -> None:
    """A block's heading and rows; a block with one row needs no heading."""
    from rich.padding import Padding
    from rich.text import Text

    is_alone = block.repeats == 1 or len(block.rows) == 1
    if not is_alone:
        title = Text.assemble((block.name, "bold"), f" ({block.repeats} times)")
        table.add_row(title, "", "", _share(block.seconds, plan))
    prefix = f"{block.name}." if is_alone and block.name else ""
    for row in block.rows:
        often = times(row, 1 if is_alone else block.repeats)
        name = _name(row, prefix, often)
        cells = (row.split, _traffic(row, plan, everything), _share(row.seconds, plan))
        table.add_row(name if is_alone else Padding(name, (0, 0, 0, 2)), *cells)


def _name(row: Row, prefix: str, often: str) -> Text:
    from rich.text import Text

    place = label(row)
    pieces = [(f"{prefix}{place}" if place else prefix.rstrip("."), ""), (kind_words(row), "cyan")]
    pieces.append((often, "dim"))
    return Text(" ").join(Text(text, style=style) for text, style in pieces if text)


def _traffic(row: Row, plan: Plan, everything: bool) -> Text:
    from rich.text import Text

    found, small = main_traffic(row, everything)
    lines = [Text(traffic_words(each, plan.mesh)) for each in found]
    if small and not found:
        lines.append(Text(f"({small} small)", style="dim"))
    return Text("\n").join(lines)


def _share(seconds: float, plan: Plan) -> Text:
    from rich.text import Text

    share = seconds / plan.estimate.step_seconds
    return Text(f"{share:.1%}", style="bold" if share >= HOT else "")


def _rivals(plan: Plan) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("")
    table.add_column("step", justify="right")
    table.add_column("", justify="right")
    table.add_column("memory", justify="right")
    table.add_column(summary_text.memory(plan))
    for rival in summary_text.comparison(plan):
        fits = Text("fits", style="green") if rival.fits else Text("DOES NOT FIT", style="red")
        table.add_row(rival.name, rival.step, rival.ratio, rival.memory, fits)
    return table


MOST_COLLECTIVES = 12


def simulation_view(found: Simulation, title: str, limit_bytes: float | None = None) -> Group:
    """The figures, what every kind of collective costs, and what the memory is made of."""
    from rich.console import Group
    from rich.text import Text

    fits = ""
    if limit_bytes is not None:
        verb = "fits" if found.peak_bytes <= limit_bytes else "DOES NOT FIT"
        fits = f", {verb} in {size(limit_bytes)}"
    return Group(
        Text(title, style="bold"),
        "",
        Text(f"Step {seconds(found.step_seconds)}, MFU {found.mfu:.1%}"),
        Text(
            f"Work {seconds(found.compute_seconds)}, communication "
            f"{seconds(found.communication_seconds)} of which work waits for "
            f"{seconds(found.exposed_seconds)}"
        ),
        Text("Busy: " + ", ".join(f"{k} {v:.1%}" for k, v in found.utilisation.items())),
        "",
        *([_collectives(found)] if found.collectives else []),
        Text(f"Peak {size(found.peak_bytes)} per device at {found.peak_at}{fits}"),
        _memory(found),
    )


def _collectives(found: Simulation) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("collective")
    for heading in ("links", "count", "time", "exposed"):
        table.add_column(heading, justify="right")
    ordered = sorted(found.collectives, key=lambda each: -each.seconds)
    for each in ordered[:MOST_COLLECTIVES]:
        name = f"{each.phase} {each.kind}"
        figures = (seconds(each.seconds), seconds(each.exposed_seconds))
        table.add_row(name, each.stream, f"{each.count:,}", *figures)
    return table


def _memory(found: Simulation) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("memory at the peak")
    table.add_column("", justify="right")
    table.add_column("", justify="right")
    for kind, held in sorted(found.peak_by_class.items(), key=lambda pair: -pair[1]):
        table.add_row(kind, size(held), f"{held / found.peak_bytes:.0%}")
    return table
