"""A plan's operators as rows, and rows as blocks: what repeats is shown once.

A path such as `encoder.3.attention.query` belongs to the block `encoder.*`; the operators of all
its repeats that have the same place in it, the same kind, split and collectives are one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardfold.graph.names import shared_prefix
from shardfold.plans.joining import chained, gathered, in_order, merged
from shardfold.plans.plan import OperatorEntry, Plan
from shardfold.plans.rows import Block, Row, Traffic
from shardfold.plans.splits import in_words

KINDS = {"scaled_dot_product_attention": "attention", "cross_entropy_loss": "cross_entropy"}
PHASES = {"forward": "fwd", "recompute": "again", "backward": "bwd", "update": "upd"}
SHORT = {
    "all_reduce": "reduce",
    "all_gather": "gather",
    "reduce_scatter": "scatter",
    "all_to_all": "swap",
}
SMALL_ROW = 0.005  # of the step: rows that are left out
SMALL_KIND = 0.03  # of the step: rows that may be joined with their neighbours
SMALL_TRAFFIC = 0.05  # of the row: collectives that are left out


@dataclass(slots=True)
class _Members:
    """The operators of one row, while they are collected."""

    block: str
    place: str
    entries: list[OperatorEntry] = field(default_factory=list)


def blocks_of(plan: Plan) -> list[Block]:
    """The plan's rows in order of first appearance, gathered into blocks."""
    skip = shared_prefix([entry.module for entry in plan.operators])
    rows: dict[object, _Members] = {}
    repeats: dict[str, set[str]] = {}
    for entry in plan.operators:
        block, index, place = _located(entry.module, skip)
        repeats.setdefault(block, set()).add(index)
        traffic = frozenset((c.phase, c.kind, c.axes) for c in entry.collectives)
        key = (block, place, entry.kind, tuple(entry.split.items()), traffic)
        rows.setdefault(key, _Members(block, place)).entries.append(entry)
    mesh = {axis.name: axis.size for axis in plan.mesh}
    blocks: list[tuple[str, list[Row]]] = []
    for members in rows.values():
        _rows_for(blocks, members.block).append(_row(members, mesh))
    small = SMALL_KIND * plan.estimate.step_seconds
    return [
        Block(name, len(repeats[name]), tuple(gathered(merged(found), small)))
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


def _row(members: _Members, mesh: Mapping[str, int]) -> Row:
    first = members.entries[0]
    kind = first.kind.rpartition(".")[2]
    keys = dict.fromkeys((c.phase, c.kind, c.axes) for c in first.collectives)
    traffic = chained([_traffic(members.entries, key) for key in keys], mesh)
    return Row(
        places=(members.place,),
        kinds=(KINDS.get(kind, kind),),
        split=split_words(first),
        count=len(members.entries),
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
        PHASES[phase],
        SHORT.get(kind, kind),
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
    """The blocks of a plan without rows of less than half a percent of the step."""
    least = 0.0 if everything else SMALL_ROW * plan.estimate.step_seconds
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
