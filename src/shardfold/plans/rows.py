"""The rows of a plan's table, and their cells in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardfold.plans.plan import AxisEntry
from shardfold.plans.units import size


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one kind on the same axes: bytes of one operator, seconds of the row."""

    phase: str
    kind: str
    axes: tuple[str, ...]
    bytes: float
    seconds: float
    is_mean: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """Operators that are split alike, at `places` of a block (empty: in the block itself).

    A mixed row holds several kinds, of which `kinds` names those that matter.
    """

    places: tuple[str, ...]
    kinds: tuple[str, ...]
    split: str
    count: int
    seconds: float
    traffic: tuple[Traffic, ...]
    is_mixed: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of a block that occurs `repeats` times; without a name, rows that stand alone."""

    name: str
    repeats: int
    rows: tuple[Row, ...]

    @property
    def seconds(self) -> float:
        """Of all repeats."""
        return sum(row.seconds for row in self.rows)


def label(row: Row) -> str:
    """`attention.query, key, value`: the places of a row without repeating their parent."""
    parent, dot, _ = row.places[0].rpartition(".")
    return parent + dot + ", ".join(place.rpartition(".")[2] for place in row.places)


def kind_words(row: Row) -> str:
    """The operators' kinds, unless the place says it already."""
    kinds = ", ".join(row.kinds)
    return "" if row.places[0].rpartition(".")[2].lower() == kinds else kinds


def times(row: Row, repeats: int) -> str:
    """How often a row occurs in its block: nothing for once, `x2`, or `5 in all`."""
    if row.is_mixed:
        return ""
    each, rest = divmod(row.count // len(row.places), repeats)
    return f"{row.count} in all" if rest else f"x{each}" if each > 1 else ""


def traffic_words(traffic: Traffic, mesh: Sequence[AxisEntry]) -> str:
    """`bwd reduce node+gpu0 2.0 MiB`; `~` marks a mean of operators that differ."""
    about = "~" if traffic.is_mean else ""
    where = axes_words(traffic.axes, mesh)
    return f"{traffic.phase} {traffic.kind} {where} {about}{size(traffic.bytes)}"


def axes_words(axes: Sequence[str], mesh: Sequence[AxisEntry]) -> str:
    """Axes by name; `all` for all, and a level's name for all of its axes."""
    if len(axes) == len(mesh) > 1:
        return "all"
    words: list[str] = []
    for level in dict.fromkeys(axis.level for axis in mesh):
        names = [axis.name for axis in mesh if axis.level == level]
        used = [name for name in names if name in axes]
        words.extend([level] if used == names else used)
    return "+".join(words)
