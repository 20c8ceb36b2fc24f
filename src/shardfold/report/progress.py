"""Progress of the planner on a terminal: the stage, how much of it is done, the time so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console

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
