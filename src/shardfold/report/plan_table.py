"""A plan's operators as rows, rows as blocks, and the cells of a row in words.

A path such as `encoder.3.attention.query` belongs to the block `encoder.*`; the operators of all
its repeats that have the same place in it, the same kind, split and collectives are one row.
Three joins make the table shorter, each of neighbours that a reader would read as one: places with
the same operator (query, key, value), small operators at one place (to, pow, mul), and
reduce-scatters that go on axis by axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import isclose, prod

from shardfold.graph.graph import shared_prefix
from shardfold.plans.parts import meshes_of_operators
from shardfold.plans.plan import AxisEntry, OperatorEntry, Plan
from shardfold.report.units import size
from shardfold.sharding.names import in_words

PHASES = {"forward": "fwd", "recompute": "recompute", "backward": "bwd", "update": "update"}


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

    A mixed row holds several kinds, of which `kinds` names those that matter. `repeats` are the
    block's repeats in which the row occurs, by number.
    """

    places: tuple[str, ...]
    kinds: tuple[str, ...]
    split: str
    count: int
    repeats: tuple[str, ...]
    seconds: float
    traffic: tuple[Traffic, ...]
    is_mixed: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of a block that occurs several times; without a name, rows that stand alone."""

    name: str
    repeats: tuple[str, ...]
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


def times(row: Row, block: Block, is_alone: bool = False) -> str:
    """How often a row occurs: nothing for once in every repeat, `x2`, `in 1-10, 12`.

    A row that stands alone, without its block's heading, counts all repeats.
    """
    per = len(row.places) * (1 if is_alone else len(row.repeats))
    each, rest = divmod(row.count, per)
    often = f"x{each}" if each > 1 and not row.is_mixed else ""
    if rest and not row.is_mixed:
        often = str(row.count)
    where = "" if len(row.repeats) == len(block.repeats) else f"in {ranges(row.repeats)}"
    return " ".join(filter(None, (often, where)))


def ranges(numbers: Sequence[str]) -> str:
    """Numbers in order, those in a row by the first and the last.

    >>> ranges(("1", "2", "3", "7"))
    '1-3, 7'
    """
    found: list[list[int]] = []
    for each in sorted(map(int, numbers)):
        if found and each == found[-1][-1] + 1:
            found[-1][1:] = [each]
        else:
            found.append([each])
    return ", ".join("-".join(map(str, each)) for each in found)


def traffic_words(traffic: Traffic, mesh: Sequence[AxisEntry]) -> str:
    """`bwd all-reduce node+gpu0 2.0 MiB`; `~` marks a mean of operators that differ."""
    about = "~" if traffic.is_mean else ""
    what = collective_words(traffic.phase, traffic.kind)
    return f"{what} {axes_words(traffic.axes, mesh)} {about}{size(traffic.bytes)}"


def collective_words(phase: str, kind: str) -> str:
    """`bwd reduce-scatter`."""
    return f"{PHASES[phase]} {kind.replace('_', '-')}"


def axes_words(axes: Sequence[str], mesh: Sequence[AxisEntry]) -> str:
    """Axes by name; `all` for all, and a level's name for all of its axes."""
    if not {axis.name for axis in mesh}.issuperset(axes):
        return "+".join(axes)  # of another part of a pipeline
    if len(axes) == len(mesh) > 1:
        return "all"
    words: list[str] = []
    for level in dict.fromkeys(axis.level for axis in mesh):
        names = [axis.name for axis in mesh if axis.level == level]
        used = [name for name in names if name in axes]
        words.extend([level] if used == names else used)
    return "+".join(words)


UNNAMED = 0.05  # of a mixed row: kinds that go unnamed
PHASE_ORDER = ("forward", "recompute", "backward", "update")


def merged(rows: Iterable[Row]) -> list[Row]:
    """Join rows that differ only in their last name, at the first of them."""
    found: list[Row] = []
    for row in rows:
        at = next((i for i, other in enumerate(found) if _is_alike(other, row)), None)
        if at is None:
            found.append(row)
        else:
            found[at] = _joined(found[at], row)
    return found


def _joined(a: Row, b: Row) -> Row:
    traffic = tuple(
        replace(mine, seconds=mine.seconds + other.seconds)
        for mine, other in zip(a.traffic, b.traffic, strict=True)
    )
    return replace(
        a,
        places=(*a.places, *b.places),
        count=a.count + b.count,
        seconds=a.seconds + b.seconds,
        traffic=traffic,
    )


def _is_alike(a: Row, b: Row) -> bool:
    if not all(a.places) or not all(b.places):
        return False
    parents = {place.rpartition(".")[0] for place in (*a.places, *b.places)}
    facts = [(r.kinds, r.split, r.count / len(r.places), r.repeats) for r in (a, b)]
    moved = [[(t.phase, t.kind, t.axes, t.bytes) for t in row.traffic] for row in (a, b)]
    return len(parents) == 1 and facts[0] == facts[1] and moved[0] == moved[1]


def gathered(rows: Iterable[Row], small: float) -> list[Row]:
    """Join small neighbours at the same places into one row of several kinds (to, pow, mul)."""
    found: list[Row] = []

    def key(row: Row) -> tuple[tuple[str, ...], tuple[str, ...], str, bool]:
        return row.places, row.repeats, row.split, row.seconds < small and all(row.places)

    for (*_, is_small), group in groupby(rows, key):
        members = list(group)
        is_many = is_small and len(members) > 1
        found.extend([_of_kinds(members)] if is_many else members)
    return found


def _of_kinds(rows: Sequence[Row]) -> Row:
    """One row for several kinds; those that cost next to nothing (views) go unnamed."""
    seconds = sum(row.seconds for row in rows)
    named = [row for row in rows if row.seconds >= UNNAMED * seconds] or rows[:1]
    return replace(
        rows[0],
        kinds=tuple(dict.fromkeys(kind for row in named for kind in row.kinds)),
        count=sum(row.count for row in rows),
        seconds=seconds,
        traffic=in_order(each for row in rows for each in row.traffic),
        is_mixed=True,
    )


def chained(found: Sequence[Traffic], mesh: Mapping[str, int]) -> list[Traffic]:
    """Join reduce-scatters that go on axis by axis, each with the part that the last one left."""
    joined: list[Traffic] = []
    for traffic in sorted(found, key=lambda each: -each.bytes):
        at = next((i for i, other in enumerate(joined) if _goes_on(other, traffic, mesh)), None)
        if at is None:
            joined.append(traffic)
            continue
        first = joined[at]
        axes = tuple(name for name in mesh if name in (*first.axes, *traffic.axes))
        joined[at] = replace(first, axes=axes, seconds=first.seconds + traffic.seconds)
    return joined


def _goes_on(first: Traffic, then: Traffic, mesh: Mapping[str, int]) -> bool:
    kinds = {(each.phase, each.kind) for each in (first, then)}
    left = first.bytes / prod(mesh[name] for name in first.axes)
    overlap = set(first.axes) & set(then.axes)
    return (
        kinds == {(first.phase, "reduce_scatter")}
        and not overlap
        and isclose(left, then.bytes, rel_tol=0.02)
    )


def in_order(found: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """Collectives by phase, the slowest first."""
    return tuple(sorted(found, key=lambda each: (PHASE_ORDER.index(each.phase), -each.seconds)))


KINDS = {"scaled_dot_product_attention": "attention", "cross_entropy_loss": "cross_entropy"}
SMALL_ROW = 0.005  # of the additive cost: rows that are left out
SMALL_KIND = 0.03  # of the additive cost: rows that may be joined with their neighbours
SMALL_TRAFFIC = 0.05  # of the row: collectives that are left out


@dataclass(slots=True)
class _Members:
    """The operators of one row, while they are collected."""

    block: str
    place: str
    mesh: Mapping[str, int]  # the sizes of its axes
    entries: list[OperatorEntry] = field(default_factory=list)
    repeats: dict[str, None] = field(default_factory=dict)


def blocks_of(plan: Plan) -> list[Block]:
    """The plan's rows in order of first appearance, gathered into blocks."""
    skip = shared_prefix([entry.module for entry in plan.operators])
    rows: dict[object, _Members] = {}
    repeats: dict[str, dict[str, None]] = {}
    for entry, mesh in zip(plan.operators, meshes_of_operators(plan), strict=True):
        block, index, place = _located(entry.module, skip)
        repeats.setdefault(block, {})[index] = None
        traffic = frozenset((c.phase, c.kind, c.axes) for c in entry.collectives)
        key = (block, place, entry.kind, tuple(entry.split.items()), traffic)
        sizes = {axis.name: axis.size for axis in mesh}
        members = rows.setdefault(key, _Members(block, place, sizes))
        members.entries.append(entry)
        members.repeats[index] = None
    blocks: list[tuple[str, list[Row]]] = []
    for members in rows.values():
        _rows_for(blocks, members.block).append(_row(members))
    small = SMALL_KIND * plan.estimate.additive_seconds
    return [
        Block(name, tuple(repeats[name]), tuple(gathered(merged(found), small)))
        for name, found in blocks
    ]


def _rows_for(blocks: list[tuple[str, list[Row]]], name: str) -> list[Row]:
    """The rows of block `name`; what is in no repeated block stays where it first appears."""
    known = blocks[-1:] if not name else blocks
    for other, rows in known:
        if other == name:
            return rows
    blocks.append((name, []))
    return blocks[-1][1]


def _located(module: str, skip: int) -> tuple[str, str, str]:
    """Split `encoder.3.norm` into the block `encoder.*`, the repeat `3` and the place `norm`."""
    parts = module.split(".")[skip:] if module else []
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if at is None:
        return "", "", ".".join(parts)
    rest = ["*" if part.isdigit() else part for part in parts[at + 1 :]]
    return ".".join([*parts[:at], "*"]), parts[at], ".".join(rest)


def _row(members: _Members) -> Row:
    first = members.entries[0]
    kind = first.kind.rpartition(".")[2]
    keys = dict.fromkeys((c.phase, c.kind, c.axes) for c in first.collectives)
    traffic = chained([_traffic(members.entries, key) for key in keys], members.mesh)
    return Row(
        places=(members.place,),
        kinds=(KINDS.get(kind, kind),),
        split=split_words(first),
        count=len(members.entries),
        repeats=tuple(members.repeats),
        seconds=sum(entry.seconds for entry in members.entries),
        traffic=in_order(traffic),
    )


def split_words(entry: OperatorEntry) -> str:
    """`batch/4 heads/8`, or `unsplit`."""
    return in_words(entry.split)


def _traffic(entries: Sequence[OperatorEntry], key: tuple[str, str, tuple[str, ...]]) -> Traffic:
    """The collectives of one kind, phase and axes, over operators that all have some."""
    mine = [[c for c in e.collectives if (c.phase, c.kind, c.axes) == key] for e in entries]
    sizes = [sum(c.bytes * c.count for c in found) for found in mine]
    phase, kind, axes = key
    return Traffic(
        phase,
        kind,
        axes,
        sum(sizes) / len(sizes),
        sum(c.seconds for found in mine for c in found),
        is_mean=max(sizes) > 1.01 * min(sizes),
    )


@dataclass(frozen=True, slots=True)
class Shown:
    """The part of a plan that a table shows: blocks, and what was left out as too small."""

    blocks: tuple[Block, ...]
    left_out: int
    left_out_seconds: float


def shown(plan: Plan, everything: bool = False) -> Shown:
    """The blocks of a plan without rows of less than half a percent of the additive cost."""
    least = 0.0 if everything else SMALL_ROW * plan.estimate.additive_seconds
    blocks: list[Block] = []
    left_out: list[Row] = []
    for block in blocks_of(plan):
        kept = tuple(row for row in block.rows if row.seconds >= least)
        left_out.extend(row for row in block.rows if row.seconds < least)
        if kept:
            blocks.append(replace(block, rows=kept))
    operators = sum(row.count for row in left_out)
    return Shown(tuple(blocks), operators, sum(row.seconds for row in left_out))


def main_traffic(row: Row, everything: bool = False) -> tuple[list[Traffic], int]:
    """The collectives that matter to a row's time, and how many are left out."""
    least = 0.0 if everything else SMALL_TRAFFIC * row.seconds
    kept = [traffic for traffic in row.traffic if traffic.seconds >= least]
    return kept, len(row.traffic) - len(kept)
