"""The exception tree: everything that shardfold raises on purpose.

    ShardfoldError
    ├── InputError          what the user gave cannot be used
    │   ├── ModelError      the model: unknown, without a loss, not capturable
    │   ├── ClusterError    the cluster: unknown, incomplete, without a legal mesh
    │   ├── PlanError       the plan file: truncated, newer, for another model
    │   ├── CheckpointError the checkpoint: damaged, newer, of another model
    │   ├── ProfileError    the profile: truncated, edited, of another device or dtype
    │   └── ProblemError    the search problem: a table that is wrong, an edge to nowhere
    ├── InfeasibleError     choices exist, but none fits in memory
    └── RunError            a plan cannot be run: a split, a process group, a batch
        └── LostError       a process of the run ended, or the link to it is lost

A message names what failed, the numbers, and what to try.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ShardfoldError(Exception):
    """Base of all errors that shardfold raises on purpose."""


class InputError(ShardfoldError, ValueError):
    """What the user gave cannot be used; the message says what to change."""


class ModelError(InputError):
    """The model is unknown, returns no loss, or cannot be captured."""


class ClusterError(InputError):
    """The cluster is unknown, its description is wrong, or it has no legal mesh."""


class PlanError(InputError):
    """The plan file is damaged, newer than this version, or for another model."""


class CheckpointError(InputError):
    """The checkpoint cannot be written, is damaged, or is of another model or optimizer."""


class ProfileError(InputError):
    """The profile is damaged, newer than this version, or of another device or dtype."""


class ProblemError(InputError):
    """The search problem is malformed; the message names the vertex or edge."""


class InfeasibleError(ShardfoldError):
    """Choices exist, but none fits in the memory limit."""

    def __init__(self, *, needed_bytes: float, limit_bytes: float, hint: str = "") -> None:
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes
        self.hint = hint
        super().__init__(
            f"No choice fits the memory limit: the smallest needs {needed_bytes:,.0f} bytes "
            f"({needed_bytes / 2**30:.2f} GiB), the limit is {limit_bytes:,.0f} "
            f"({limit_bytes / 2**30:.2f} GiB).{' ' + hint if hint else ''}"
        )


class RunError(ShardfoldError):
    """The plan cannot be run here; the message names the operator, the batch or the process."""


class LostError(RunError):
    """A process of the run ended, or the link to it is lost; nothing is wrong with the input."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause that suggests the known names closest to `name`, or lists them all.

    >>> nearest("alexnit", ["alexnet", "gpt2"])
    'Did you mean alexnet?'
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return f"Did you mean {' or '.join(close)}?"
    return f"Known: {', '.join(names)}."


def renaming(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """For a function with renamed options: an old name is refused with the new one."""

    def renamed(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            for old, new in names.items():
                if old in kwargs:
                    raise InputError(
                        f"{function.__name__} has no option {old!r}. It is called {new} now."
                    )
            return function(*args, **kwargs)

        return called

    return renamed
