"""The terminal: a plan's view, which `print(plan)` shows, too; a simulated step; progress."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from shardfold.plans import Plan
from shardfold.report.units import seconds, size
from shardfold.report.view import HEADS, PlanView, TableRow, view
from shardfold.simulate import Simulation

if TYPE_CHECKING:
    from rich.box import Box
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text


WIDTH = 80
NAME, SPLIT, SHARE = 18, 17, 6  # the narrowest names, the widest split, the share
HOT = 0.1  # rows of at least this share stand out
STYLES = {"plain": "", "alarm": "red", "warning": "yellow", "aside": "dim"}


def as_text(plan: Plan) -> str:
    """What `print(plan)` shows: the view as plain text of 80 columns."""
    from rich.console import Console

    stream = io.StringIO()
    Console(file=stream, width=WIDTH, no_color=True, force_terminal=False, highlight=False).print(
        plan_view(view(plan))
    )
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def plan_view(shown: PlanView, width: int = WIDTH) -> Group:
    """A plan's view, ready to print on a terminal of that width."""
    from rich.console import Group
    from rich.text import Text

    return Group(
        Text(shown.title, style="bold"),
        Text(shown.facts),
        "",
        _operators(shown, width),
        Text(shown.legend, style="dim"),
        "",
        _contenders(shown),
        "",
        *(_sentence(each.text, STYLES[each.tone], width) for each in shown.sentences),
    )


def _sentence(text: str, style: str, width: int) -> Text:
    """A sentence whose further lines are set in."""
    from rich.text import Text

    return _broken(Text(text, style=style), width, "  ")


def _operators(shown: PlanView, width: int) -> Table:
    from rich.table import Table

    cells = [row.cells for row in shown.rows]
    traffic = _widest(line for _, _, lines, _ in cells for line in lines.split("\n"))
    split = min(_widest(words for _, words, _, _ in cells), SPLIT)
    name = max(width - traffic - split - SHARE - 3, NAME)
    table = Table(box=_box(), padding=0, show_edge=False)
    for head, wide in zip(HEADS, (name, split, traffic, SHARE), strict=True):
        table.add_column(head, width=wide, justify="right" if head == HEADS[-1] else "left")
    for row in shown.rows:
        table.add_row(_name(row, name), row.split, row.cells[2], _share(row.share))
    return table


def _box() -> Box:
    """A line under the heads, in characters that every terminal has."""
    from rich.box import Box

    return Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def _widest(cells: Iterable[str]) -> int:
    """The widest cell of a column, or its heading."""
    return max([len("collectives"), *map(len, cells)])


def _name(row: TableRow, width: int) -> Text:
    from rich.text import Text

    pieces = ((row.name, "bold" if row.is_heading else ""), (row.kind, "cyan"), (row.often, "dim"))
    name = Text(" ").join(Text(text, style=style) for text, style in pieces if text)
    indent = "  " * row.depth
    return _broken(Text(indent).append(name), width, indent + "  ")


def _broken(text: Text, width: int, indent: str) -> Text:
    """Lines of that width, broken between words, or after a dot or underscore of a long name."""
    from rich.text import Text

    lines = text.divide(breaks(text.plain, width, len(indent)))
    for line in lines:
        line.rstrip()
    return Text("\n" + indent).join(lines)


def breaks(text: str, width: int, indent: int = 0) -> list[int]:
    """Where lines begin, the first aside; all others are set in.

    >>> breaks("encoder.0.pre_feedforward_layernorm mul", 20)
    [14, 36]
    """
    found: list[int] = []
    start, room = 0, width
    for word in re.finditer(r"\S+", text):
        if word.end() - start <= room:
            continue
        if word.start() > start and text[start : word.start()].strip():
            start, room = word.start(), width - indent
            found.append(start)
        for piece in re.finditer(r"[^._]*[._]*", word.group()):
            at, end = word.start() + piece.start(), word.start() + piece.end()
            if end - start > room and at > start and text[start:at].strip():
                start, room = at, width - indent
                found.append(start)
    return found


def _share(share: float) -> Text:
    from rich.text import Text

    return Text(f"{share:.1%}", style="bold" if share >= HOT else "")


def _contenders(shown: PlanView) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=_box(), pad_edge=False, show_edge=False)
    for head in ("", "step", "", "memory", shown.limit):
        table.add_column(head, justify="left" if head in ("", shown.limit) else "right")
    table.columns[2].justify = "right"
    for each in shown.contenders:
        *words, fits = each.words
        table.add_row(*words, Text(fits, style="green" if each.fits else "red"))
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
            f"Compute {seconds(found.compute_seconds)}, communication "
            f"{seconds(found.communication_seconds)}, of which {seconds(found.exposed_seconds)} "
            "is exposed: compute waits for it"
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
        name = f"{each.phase} {each.kind.replace('_', '-')}"
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


WORDS = {
    "capture": "capturing the model",
    "search": "searching",
    "describe": "writing the plan",
    "explain": "pricing other splits",
}


class Stage(Protocol):
    """Where the planner is."""

    @property
    def name(self) -> str:
        """The stage's name."""
        ...

    @property
    def done(self) -> int:
        """How much of it is done."""
        ...

    @property
    def total(self) -> int:
        """How much there is to do."""
        ...


@contextmanager
def drawn(console: Console) -> Iterator[Callable[[Stage], None]]:
    """A watch that draws on `console`, and leaves no trace when the work ends.

    Where the console is no terminal, nothing is drawn.
    """
    if not console.is_terminal:
        yield lambda stage: None
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns,
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bars:
        task = bars.add_task("building the model", total=None, count="")

        def watch(stage: Stage) -> None:
            is_countable = stage.total > 1
            bars.update(
                task,
                description=WORDS.get(stage.name, stage.name),
                completed=stage.done,
                total=stage.total if is_countable else None,
                count=f"{stage.done}/{stage.total}" if is_countable else "",
            )

        yield watch
