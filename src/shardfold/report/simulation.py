"""A simulated step as a table for the terminal: time per stream, collectives, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardfold.plans.units import seconds, size
from shardfold.simulate import Simulation

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

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
