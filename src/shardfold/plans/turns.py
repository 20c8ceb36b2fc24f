"""What an operator takes and gives in one of its phases, and pieces of memory in between."""

from __future__ import annotations

from dataclasses import dataclass, field

Bytes = dict[str, float]


@dataclass(slots=True)
class Turn:
    """What one operator takes as one of its phases begins, and gives as it ends.

    `moved` is taken first, by the collectives that bring operands.
    """

    moved: Bytes = field(default_factory=dict)
    takes: Bytes = field(default_factory=dict)
    gives: Bytes = field(default_factory=dict)


@dataclass(slots=True)
class Gathered:
    """A parameter on its way to a reader: the whole part that is used, and its gradient."""

    used: float = 0.0  # 0: used as it is stored
    regathered: bool = False
    gradient: float = 0.0  # before it is reduced, where it has to be
    reduced: float = 0.0  # the part that stays


def add(into: Bytes, kind: str, size: float) -> None:
    """Put bytes of a class on top of what is there."""
    if size:
        into[kind] = into.get(kind, 0.0) + size
