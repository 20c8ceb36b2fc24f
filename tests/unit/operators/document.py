"""Writes the reference page of operators from the table itself, each shown on an example call.

Run `python -m operators.document` in `tests/unit` to write it again.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shardfold.operators import (
    attention,
    convolution,
    elementwise,
    experts,
    indexing,
    losses,
    matrix,
    norms,
    recurrent,
    reductions,
    rule_for,
    views,
)
from shardfold.operators.notation import Exchange, Rule

from .oracle import Case, call_of, splittable

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "operators.md"
FAMILIES = {
    "Matrix products": matrix,
    "Experts": experts,
    "Attention": attention,
    "Convolution and pooling": convolution,
    "Normalisation and softmax": norms,
    "Losses": losses,
    "Recurrent networks": recurrent,
    "Look-ups, scatters, sorting, creation": indexing,
    "Reductions": reductions,
    "Views": views,
    "Elementwise": elementwise,
}
HEAD = """\
# Operators and how they split

Every operator that has a rule, by family. The notation names the factor that each dim runs over,
`operands -> results`: `(g c)` is one dim of two factors, `.` a dim that no factor describes. It is
shown on one example call; other ranks and options follow the same pattern. An option can only
forbid a split that is listed here, or allow another (a stride that does not divide, a dim that is
reduced).

*Free* factors are split at no cost inside the operator. *Summed* ones leave the results that lack
them partial. *With an exchange* names the collectives, and the numbers that each carries for every
point of the factors in brackets. All other factors are never split. An operator that is not listed
is run in parts to find its splits; if it has none, the plan names it with its cost.
"""
COLUMNS = "| operator | notation | free | summed | with an exchange |\n|---|---|---|---|---|"


def page(cases: Iterable[Case]) -> str:
    """The whole page; the first case of an operator is its example."""
    first: dict[str, Case] = {}
    for case in cases:
        first.setdefault(case.kind, case)
    sections = [HEAD]
    for title, family in FAMILIES.items():
        rows: dict[str, list[str]] = {}
        for kind in (kind for kind, operator in family.TABLE.items() if operator.rule):
            rows.setdefault(_row(rule_for(call_of(first[kind]))), []).append(f"`{kind}`")
        lines = [f"| {', '.join(kinds)} | {row} |" for row, kinds in rows.items()]
        sections.append("\n".join([f"## {title}", "", COLUMNS, *lines]) + "\n")
    return "\n".join(sections)


def _row(rule: Rule) -> str:
    exchanged = {e.factor for e in rule.exchanges}
    summed = [f for f in splittable(rule) if f in rule.reduced - rule.resolved]
    columns = [
        f"`{rule}`".replace(" `", "`").replace("` ", "`"),
        _list(f for f in splittable(rule) if f not in {*summed, *exchanged}),
        _list(summed),
        _exchanges(rule),
    ]
    return " | ".join(columns)


def _list(factors: Iterable[str]) -> str:
    return ", ".join(factors) or "-"


def _exchanges(rule: Rule) -> str:
    """Each collective once, with all factors that need it."""
    needs: dict[str, list[str]] = {}
    for factor in splittable(rule):
        texts = [_exchange(e) for e in rule.exchanges if e.factor == factor]
        if texts:
            needs.setdefault(", ".join(texts), []).append(factor)
    return "; ".join(f"{', '.join(fs)}: {text}" for text, fs in needs.items()) or "-"


def _exchange(exchange: Exchange) -> str:
    times = f"{exchange.repeats} x " if exchange.repeats > 1 else ""
    where = f" [{' '.join(exchange.over)}]" if exchange.over else ""
    return f"{exchange.phase} {times}{exchange.kind.replace('_', '-')} {exchange.words:g}{where}"


if __name__ == "__main__":
    from .test_rules import CASES

    PAGE.write_text(page(CASES))
