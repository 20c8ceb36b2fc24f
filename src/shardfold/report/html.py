"""A plan as HTML: one page that needs nothing else, and tables for a notebook.

The page has styles, programs and data inside it; `facts` are the data, as plain values for JSON. A
notebook shows tables and sentences, without scripts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from shardfold.graph.precision import precision_named
from shardfold.plans import Plan
from shardfold.plans.drawing_data import expanded
from shardfold.plans.plan import CollectiveEntry, Face, OperatorEntry, Side
from shardfold.plans.plan import Row as Drawn
from shardfold.report import summary_text as summary
from shardfold.report.module_tree import Branch, Leaf, Link, Outline, leaves, outline
from shardfold.report.timeline import Track, additive, of_stages, simulated
from shardfold.report.view import HEADS, PlanView, view
from shardfold.simulate import timeline

if TYPE_CHECKING:
    from shardfold.explanation.explanation import Explanation, Reason


Plain = dict[str, Any]


def facts(
    plan: Plan,
    title: str,
    *,
    explanation: Explanation | None = None,
    rivals: Sequence[Plain] = (),
    model: str | None = None,
) -> Plain:
    """Everything that the page draws. What is not known is empty, and the page says so."""
    found, words = outline(plan), view(plan, model=model)
    shown = list(leaves(found.root))
    number = {id(leaf): k for k, leaf in enumerate(shown)}
    drawn = list(expanded(plan.sketch)) if plan.sketch is not None else []
    reasons = {} if explanation is None else _reasons(explanation, plan, shown)
    return {
        "title": title,
        "model": model,
        "view": _view(words),
        "cluster": plan.cluster,
        "mesh": [{"name": a.name, "size": a.size, "level": a.level} for a in plan.mesh],
        "levels": plan.provenance.cluster.get("levels", []),
        "device": plan.provenance.cluster.get("device", {}),
        "estimate": _estimate(plan),
        "rivals": _rivals(plan, words, rivals),
        "meshes": [[m.mesh, m.step_seconds] for m in plan.meshes],
        "made": _made(plan),
        "faces": [] if plan.sketch is None else [_face(face) for face in plan.sketch.faces],
        "ops": [_operator(leaf, plan.operators, drawn) for leaf in shown],
        "tree": _node(found.root, found, number),
        "reasons": reasons,
        "step": _track(plan, drawn).plain(),
    }


def _track(plan: Plan, drawn: Sequence[Drawn]) -> Track:
    """The step in time: simulated where the plan holds its schedule."""
    if plan.pipeline is not None and plan.pipeline.seconds:
        return of_stages(plan)
    if plan.schedule is None:
        return additive(plan, drawn)
    return simulated(*timeline(plan.schedule))


def _view(shown: PlanView) -> Plain:
    """The words that a terminal shows, for the page to set."""
    return {
        "facts": shown.facts,
        "heads": HEADS,
        "rows": [[row.depth, row.is_heading, *row.cells] for row in shown.rows],
        "legend": shown.legend,
        "limit": shown.limit,
        "contenders": [each.words for each in shown.contenders],
        "sentences": [[each.text, each.tone] for each in shown.sentences],
    }


def _estimate(plan: Plan) -> Plain:
    e = plan.estimate
    return {
        "step": e.step_seconds,
        "is_simulated": plan.simulation is not None,
        "rate": ", ".join(summary.throughput(plan)),
        "additive": e.additive_seconds,
        "compute": e.compute_seconds,
        "communication": e.communication_seconds,
        "update": e.update_seconds,
        "bound": e.additive_lower_bound_seconds,
        "optimal": e.optimal,
        "proof": summary.proof(plan),
        "peak": e.peak_bytes,
        "limit": e.limit_bytes,
        "device": e.device_bytes,
        "fits": plan.fits,
        "parameters": plan.provenance.parameters,
        "operators": plan.provenance.operators,
    }


def _rivals(plan: Plan, shown: PlanView, others: Sequence[Plain]) -> list[Plain]:
    """The plan, the baselines that it knows, and whatever a comparison found."""
    found = [
        *(_rival(c.name, c.step_seconds, c.peak_bytes, c.recomputes) for c in shown.contenders),
        *(
            _rival(f.name, f.step_seconds, f.peak_bytes, f.recomputes)
            for f in plan.finalists
            if f.is_baseline
        ),
        *others,
    ]
    once: dict[str, Plain] = {}
    for entry in found:
        once.setdefault(entry["name"], entry)
    return list(once.values())


def _rival(name: str, seconds: float, bytes_: float, recomputes: bool) -> Plain:
    return {"name": name, "seconds": seconds, "bytes": bytes_, "recomputes": recomputes}


def _made(plan: Plan) -> list[tuple[str, str]]:
    made = plan.provenance
    return [
        ("cost model", made.request.cost),
        ("optimizer", made.request.optimizer),
        ("precision", str(precision_named(made.request.numbers))),
        ("graph", made.graph),
        *((name, version) for name, version in made.versions.items()),
    ]


def _face(face: Face) -> Plain:
    return {
        "rule": face.rule,
        "factors": face.factors,
        "operands": [_side(side) for side in face.operands],
        "results": [_side(side) for side in face.results],
    }


def _side(side: Side) -> Plain:
    return {
        "name": side.name,
        "role": side.role,
        "dtype": side.dtype,
        "shape": side.shape,
        "layout": side.layout,
    }


def _operator(leaf: Leaf, operators: Sequence[OperatorEntry], drawn: Sequence[Drawn]) -> Plain:
    """One operator for all that it stands for: one from the middle, and the time of all."""
    at = leaf.places[len(leaf.places) // 2]
    entry = operators[at]
    found: Plain = {
        "name": entry.name,
        "label": leaf.name,
        "kind": entry.kind,
        "module": entry.module,
        "path": _path(operators[leaf.places[0]], operators[leaf.places[-1]]),
        "source": entry.source,
        "config": entry.config,
        "split": entry.split,
        "seconds": entry.seconds,
        "total": sum(operators[k].seconds for k in leaf.places),
        "sent": sum(c.seconds for k in leaf.places for c in operators[k].collectives),
        "count": len(leaf.places),
        "collectives": [_collective(c) for c in entry.collectives],
    }
    if len(leaf.places) > 1:
        found["first"] = operators[leaf.places[0]].name
        found["last"] = operators[leaf.places[-1]].name
    if drawn:
        row = drawn[at]
        found["face"] = row.face
        found["work"] = dict(row.work)
        found["moves"] = [[m.operand, m.phase, m.kind, m.axes, m.bytes] for m in row.moves]
    return found


def _path(first: OperatorEntry, last: OperatorEntry) -> str:
    """`layers.0–125.mlp.up`: where an operator and those alike are, or its name."""
    pairs = zip(first.module.split("."), last.module.split("."), strict=False)
    return ".".join(a if a == b else f"{a}–{b}" for a, b in pairs) or first.name


def _collective(entry: CollectiveEntry) -> list[Any]:
    return [entry.phase, entry.kind, entry.axes, entry.bytes, entry.count, entry.seconds]


def _node(node: Branch | Leaf, found: Outline, number: Mapping[int, int]) -> Plain:
    if isinstance(node, Leaf):
        return {"op": number[id(node)]}
    return {
        "name": node.name,
        "times": node.times,
        "children": [_node(child, found, number) for child in node.children],
        "links": [_link(link) for link in found.links.get(id(node), ())],
    }


def _link(link: Link) -> list[Any]:
    moved = [[*key, size] for key, size in link.moved.items()]
    return [link.source, link.target, moved]


def _reasons(found: Explanation, plan: Plan, shown: Sequence[Leaf]) -> dict[str, Plain]:
    """The runner-up of each explained operator, by the number of the leaf that shows it."""
    place = {entry.name: at for at, entry in enumerate(plan.operators)}
    leaf_of = {at: k for k, leaf in enumerate(shown) for at in leaf.places}
    return {str(leaf_of[place[r.operator.name]]): _reason(r) for r in found.reasons}


def _reason(reason: Reason) -> Plain:
    return {
        "additive": reason.additive_seconds,
        "pinned": reason.is_pinned,
        "others": [
            [a.split, a.additive_seconds, a.additive_lower_bound_seconds]
            for a in reason.alternatives
        ],
        "terms": [[term.what, term.seconds] for term in reason.terms],
        "changes": [[c.module or c.name, c.before, c.after] for c in reason.changes],
    }


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
