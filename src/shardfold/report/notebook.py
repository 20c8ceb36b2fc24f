"""A plan's view as HTML for a notebook: tables and sentences, without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from shardfold.plans import Plan
from shardfold.report.view import HEADS, view

NUMBER = "text-align:right;white-space:nowrap"
TEXT = "text-align:left;vertical-align:top"


def notebook_html(plan: Plan) -> str:
    """What `print(plan)` says, in the notebook's own font."""
    shown = view(plan)
    rows = [("\u2003" * row.depth + row.cells[0], *row.cells[1:]) for row in shown.rows]
    heads = ("", "step", "", "memory", shown.limit)
    says = "<br>".join(escape(each.text) for each in shown.sentences)
    return (
        f"<div><strong>{escape(shown.title)}</strong><br>{escape(shown.facts)}"
        f"{_table(HEADS, rows, numbers={3})}<small>{escape(shown.legend)}</small>"
        f"{_table(heads, [each.words for each in shown.contenders], numbers={1, 2, 3})}"
        f"<p>{says}</p></div>"
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: set[int]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        styled = (
            f'<{tag} style="{NUMBER if k in numbers else TEXT}">'
            f"{escape(cell).replace(chr(10), '<br>')}</{tag}>"
            for k, cell in enumerate(cells)
        )
        return f"<tr>{''.join(styled)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><thead>{line(heads, 'th')}</thead><tbody>{body}</tbody></table>"
