"""A plan as one HTML file that needs nothing else: styles, programs and data are inside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from shardfold.plans import Plan
from shardfold.report.page_data import facts

if TYPE_CHECKING:
    from shardfold.explanation.types import Explanation

SCRIPTS = ("words", "layout", "graph", "grid", "inspector", "panels", "timeline", "main")
UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}  # these could end the data's element


def to_html(
    plan: Plan,
    *,
    title: str | None = None,
    explanation: Explanation | None = None,
    rivals: Sequence[Mapping[str, Any]] = (),
    model: str | None = None,
) -> str:
    """The report of a plan as the text of one HTML file."""
    name = title or titled(plan, model)
    data = facts(
        plan,
        name,
        explanation=explanation,
        rivals=[dict(rival) for rival in rivals],
        model=model,
    )
    page = _asset("page.html")
    parts = {
        "title": escape(name.encode("utf-8", "replace").decode()),
        "style": _asset("report.css"),
        "data": embedded(data),
        "script": "\n".join(_asset(f"{script}.js") for script in SCRIPTS),
    }
    head, *rest = page.split("{{")
    return head + "".join(parts[key] + text for key, _, text in (r.partition("}}") for r in rest))


def titled(plan: Plan, model: str | None) -> str:
    """The model, as far as it has a name, and the cluster."""
    return f"{model or plan.provenance.model or 'A plan'} on {plan.cluster}"


def embedded(data: Any) -> str:
    """JSON in ASCII that can stand inside a script element whatever texts it holds."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character, safe in UNSAFE.items():
        text = text.replace(character, safe)
    return text


def _asset(name: str) -> str:
    return (files("shardfold.report") / "assets" / name).read_text(encoding="utf-8")
