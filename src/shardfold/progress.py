"""Progress of long work: the stage it is in, and how much of it is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the work is: the name of the stage, and how much of it is done."""

    name: str
    done: int
    total: int


Watch = Callable[[Stage], None]


def ignore(stage: Stage) -> None:
    """A watch that looks away."""
