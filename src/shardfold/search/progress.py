"""What a search reports while it works; somebody else draws it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """One step of a search: `done` of `total` steps, and the best cost known, if any."""

    method: str
    done: int
    total: int
    table_entries: int = 0
    best_cost: float | None = None


Watch = Callable[[Progress], None]


def ignore(progress: Progress) -> None:
    """A watch that looks away."""
