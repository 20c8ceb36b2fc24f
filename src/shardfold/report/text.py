"""A plan as plain text of 80 columns: what `print(plan)` shows."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import zip_longest

from shardfold.plans.plan import Plan
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

WIDTH = 80
COLUMNS = (26, 16, 30)  # operator, split, collectives; then the share of the step
SHARE = 6


def as_text(plan: Plan) -> str:
    """The whole plan as plain text."""
    wrapped = [
        *_filled(f"Step: {summary_text.parts(plan)}; {summary_text.proof(plan)}."),
        *(line for text in summary_text.recomputed(plan) for line in _filled(text)),
        *(line for text in summary_text.accumulated(plan) for line in _filled(text)),
        *(line for text in summary_text.simulated(plan) for line in _filled(text)),
        *(line for text in summary_text.too_large(plan) for line in _filled(text)),
        *(line for text in summary_text.pinned(plan) for line in _filled(text)),
        *_filled(summary_text.meshes(plan)),
        *(line for text in summary_text.unsplit(plan) for line in _filled(text)),
        *(line for note in plan.provenance.notes for line in _filled(note)),
        summary_text.effort(plan),
    ]
    lines = [*summary_text.heading(plan), "", *_table(plan), "", *_totals(plan), *wrapped]
    return "\n".join(lines)


def _table(plan: Plan) -> list[str]:
    view = shown(plan)
    lines = _line(("operator", "split", "collectives"), "step")
    lines.append("-" * WIDTH)
    for block in view.blocks:
        lines.extend(_block(block, plan))
    if view.left_out:
        share = view.left_out_seconds / plan.estimate.step_seconds
        lines.extend(_line((f"{view.left_out} small operators", "", ""), f"{share:.1%}"))
    return lines


def _block(block: Block, plan: Plan) -> list[str]:
    """A block's heading and rows; a block with one row needs no heading."""
    total = plan.estimate.step_seconds
    if block.repeats == 1 or len(block.rows) == 1:
        prefix = f"{block.name}." if block.name else ""
        return [line for row in block.rows for line in _row(row, block, plan, prefix)]
    name = f"{block.name} ({block.repeats} times)"
    lines = _line((name, "", ""), f"{block.seconds / total:.1%}")
    for row in block.rows:
        lines.extend(_row(row, block, plan, "  "))
    return lines


def _row(row: Row, block: Block, plan: Plan, prefix: str) -> list[str]:
    alone = block.repeats > 1 and not prefix.isspace()
    often = times(row, 1 if alone else block.repeats)
    name = " ".join(filter(None, (label(row), kind_words(row), often)))
    found, small = main_traffic(row)
    traffic = [traffic_words(each, plan.mesh) for each in found]
    if small and not found:
        traffic.append(f"({small} small)")
    share = f"{row.seconds / plan.estimate.step_seconds:.1%}"
    return _line((prefix + name, row.split, "\n".join(traffic)), share)


def _line(cells: Sequence[str], share: str) -> list[str]:
    """One row of the table: cells wrapped to their columns, the share at the right end."""
    wrapped = [_cell(cell, width) for cell, width in zip(cells, COLUMNS, strict=True)]
    lines = []
    for number, parts in enumerate(zip_longest(*wrapped, fillvalue="")):
        padded = " ".join(f"{part:{width}}" for part, width in zip(parts, COLUMNS, strict=True))
        lines.append((padded + (f"{share:>{SHARE}}" if number == 0 else "")).rstrip())
    return lines


def _cell(text: str, width: int) -> list[str]:
    indent = text[: len(text) - len(text.lstrip())]
    found: list[str] = []
    for line in text.splitlines() or [""]:
        found.extend(textwrap.wrap(line, width, subsequent_indent=indent + "  ") or [""])
    return found


def _totals(plan: Plan) -> list[str]:
    lines = [f"{'':14}{'step':>9}{'':8}{'memory':>11}   {summary_text.memory(plan)}"]
    for c in summary_text.comparison(plan):
        fits = "fits" if c.fits else "DOES NOT FIT"
        lines.append(f"{c.name:14}{c.step:>9}{c.ratio:>8}{c.memory:>11}   {fits}")
    return [*lines, ""]


def _filled(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")
