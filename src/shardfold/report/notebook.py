"""A plan as a small table for a notebook: the same rows as in the terminal, as HTML."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

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

NUMBER = "text-align:right;white-space:nowrap"
TEXT = "text-align:left;vertical-align:top"


def summary(plan: Plan) -> str:
    """What `print(plan)` says, with the page's own font and no scripts."""
    title, figures = summary_text.heading(plan)
    says = [
        f"Step: {summary_text.parts(plan)}; {summary_text.proof(plan)}.",
        *summary_text.accumulated(plan),
        *summary_text.too_large(plan),
        *summary_text.pinned(plan),
        summary_text.meshes(plan),
        *summary_text.unsplit(plan),
    ]
    return (
        f"<div><strong>{escape(title)}</strong><br>{escape(figures)}"
        f"{_operators(plan)}{_rivals(plan)}"
        f"<p>{'<br>'.join(map(escape, says))}</p></div>"
    )


def _operators(plan: Plan) -> str:
    view = shown(plan)
    rows = [row for block in view.blocks for row in _block(block, plan)]
    if view.left_out:
        name = f"{view.left_out} small operators"
        rows.append((name, "", "", _share(view.left_out_seconds, plan)))
    return _table(("operator", "split", "collectives", "step"), rows, numbers=frozenset({3}))


def _block(block: Block, plan: Plan) -> Iterable[tuple[str, ...]]:
    """A block's heading and rows; a block with one row needs no heading."""
    is_alone = block.repeats == 1 or len(block.rows) == 1
    if not is_alone:
        title = f"{block.name} ({block.repeats} times)"
        yield (title, "", "", _share(block.seconds, plan))
    prefix = f"{block.name}." if is_alone and block.name else "\u2003" * (not is_alone)
    for row in block.rows:
        yield _row(row, prefix, times(row, 1 if is_alone else block.repeats), plan)


def _row(row: Row, prefix: str, often: str, plan: Plan) -> tuple[str, ...]:
    found, small = main_traffic(row)
    traffic = [traffic_words(each, plan.mesh) for each in found]
    if small and not found:
        traffic.append(f"({small} small)")
    name = " ".join(filter(None, (label(row), kind_words(row), often)))
    return (prefix + name, row.split, "\n".join(traffic), _share(row.seconds, plan))


def _rivals(plan: Plan) -> str:
    rows = [
        (r.name, r.step, r.ratio, r.memory, "fits" if r.fits else "DOES NOT FIT")
        for r in summary_text.comparison(plan)
    ]
    return _table(
        ("", "step", "", "memory", summary_text.memory(plan)), rows, numbers=frozenset({1, 2, 3})
    )


def _share(seconds: float, plan: Plan) -> str:
    return f"{seconds / plan.estimate.step_seconds:.1%}"


def _table(
    heads: tuple[str, ...], rows: Iterable[tuple[str, ...]], numbers: frozenset[int] = frozenset()
) -> str:
    def line(cells: tuple[str, ...], tag: str) -> str:
        styled = (
            f'<{tag} style="{NUMBER if k in numbers else TEXT}">'
            f"{escape(cell).replace(chr(10), '<br>')}</{tag}>"
            for k, cell in enumerate(cells)
        )
        return f"<tr>{''.join(styled)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><thead>{line(heads, 'th')}</thead><tbody>{body}</tbody></table>"
