"""What is shown of a plan: a title, a table, the baselines beside it, and sentences.

The terminal, `print(plan)`, notebooks and the HTML report write this one view, each in its own
way, so that none says more than another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardfold.plans import Plan
from shardfold.report import summary_text
from shardfold.report.plan_table import (
    Block,
    Row,
    kind_words,
    label,
    main_traffic,
    shown,
    times,
    traffic_words,
)
from shardfold.report.summary_text import Contender, Sentence

HEADS = ("operator", "split", "collectives", "share")
LEGEND = (
    "fwd, bwd: forward, backward; sizes are of one operator on one device. "
    "share: of the additive cost."
)
UNNAMED = " dim1, v1, v1_0: dims, or pieces of dims, that no operator has a word for."
LEFT_OUT = " Collectives of under 5% of their row are left out (shardfold show --all has them)."


@dataclass(frozen=True, slots=True)
class TableRow:
    """Operators that are split alike, or the heading of the block that follows."""

    name: str
    kind: str = ""
    often: str = ""
    split: str = ""
    collectives: tuple[str, ...] = ()
    share: float = 0.0
    depth: int = 0  # 1: inside the block above
    is_heading: bool = False

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The words of its four cells."""
        label = " ".join(filter(None, (self.name, self.kind, self.often)))
        return label, self.split, "\n".join(self.collectives), f"{self.share:.1%}"


@dataclass(frozen=True, slots=True)
class PlanView:
    """All that is shown of a plan, in words."""

    title: str
    facts: str
    rows: tuple[TableRow, ...]
    legend: str
    limit: str
    contenders: tuple[Contender, ...]
    sentences: tuple[Sentence, ...]


def view(plan: Plan, *, model: str | None = None, everything: bool = False) -> PlanView:
    """What is shown of a plan; with `everything`, the small rows and collectives, too."""
    title, facts = summary_text.heading(plan, model)
    rows = tuple(_rows(plan, everything))
    return PlanView(
        title=title,
        facts=facts,
        rows=rows,
        legend=_legend(rows, everything),
        limit=summary_text.limit(plan),
        contenders=summary_text.contenders(plan),
        sentences=summary_text.sentences(plan),
    )


def _legend(rows: Sequence[TableRow], everything: bool) -> str:
    """What the words of a table mean that are not the reader's own."""
    is_unnamed = any(re.search(r"\b(dim|v)\d", row.split) for row in rows)
    return LEGEND + UNNAMED * is_unnamed + LEFT_OUT * (not everything)


def _rows(plan: Plan, everything: bool) -> Iterator[TableRow]:
    total = plan.estimate.additive_seconds
    found = shown(plan, everything)
    for block in found.blocks:
        is_alone = len(block.repeats) == 1 or len(block.rows) == 1
        if not is_alone:
            often = f"({len(block.repeats)} times)"
            yield TableRow(block.name, "", often, share=block.seconds / total, is_heading=True)
        for row in block.rows:
            yield _row(row, block, plan, everything, is_alone)
    if found.left_out:
        name = f"{found.left_out} small operators"
        yield TableRow(name, share=found.left_out_seconds / total)


def _row(row: Row, block: Block, plan: Plan, everything: bool, is_alone: bool) -> TableRow:
    traffic, small = main_traffic(row, everything)
    words = [traffic_words(each, plan.mesh) for each in traffic]
    if small and not traffic:
        words.append(f"({small} small)")
    prefix = f"{block.name}." if is_alone and block.name else ""
    return TableRow(
        name=(prefix + label(row)).rstrip("."),
        kind=kind_words(row),
        often=times(row, block, is_alone),
        split=row.split,
        collectives=tuple(words),
        share=row.seconds / plan.estimate.additive_seconds,
        depth=0 if is_alone else 1,
    )
