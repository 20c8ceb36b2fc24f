"""Long work: the stage it is in, how much of it is done, and no garbage collection meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def without_gc() -> Iterator[None]:
    """No collection inside; the collector is left as it was found.

    Graphs of large models are hundreds of thousands of small tuples that all stay alive; scanning
    them again and again for cycles that are not there takes as long as making them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
