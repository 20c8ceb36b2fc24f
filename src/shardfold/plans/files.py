"""Plans as versioned JSON: readable in a diff, checked when read, never half written."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from shardfold.errors import PlanError
from shardfold.graph import Graph
from shardfold.plans.plan import VERSION, Plan
from shardfold.versioned_json import Document

FORMAT = "shardfold-plan"
DOCUMENT = Document("plan", FORMAT, VERSION, PlanError, "plan again")


def dumps(plan: Plan) -> str:
    """JSON with one operator, tensor or parameter a line."""
    plain = msgspec.to_builtins(plan)
    parts = []
    for key, value in plain.items():
        if isinstance(value, list) and value:
            rows = ",\n".join("    " + json.dumps(row) for row in value)
            parts.append(f'  "{key}": [\n{rows}\n  ]')
        elif isinstance(value, dict):
            rows = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            parts.append(f'  "{key}": {{\n{rows}\n  }}')
        else:
            parts.append(f'  "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def save(plan: Plan, path: str | Path) -> None:
    """Replace the file by a complete plan."""
    DOCUMENT.save(path, dumps(plan))


def load(path: str | Path, graph: Graph | None = None) -> Plan:
    """Read a plan file, and check it against a model's graph where one is given."""
    plan = loads(DOCUMENT.read(path), str(path))
    if graph is not None:
        check(plan, graph)
    return plan


def loads(data: bytes, source: str = "plan") -> Plan:
    """Parse and validate a plan."""
    return DOCUMENT.decode(data, source, Plan)


def check(plan: Plan, graph: Graph) -> None:
    """Refuse a plan that was made for another model, batch or dtype."""
    if plan.provenance.graph == graph.digest():
        return
    raise PlanError(f"The plan is for another model: {_first_difference(plan, graph)}. Plan again.")


def _first_difference(plan: Plan, graph: Graph) -> str:
    planned = {p.names: p.shape for p in plan.parameters}
    for index in graph.parameters():
        tensor = graph.tensors[index]
        if tensor.names not in planned:
            return f"it has no parameter {tensor.name}"
        if planned[tensor.names] != tensor.type.shape:
            return (
                f"its parameter {tensor.name} has shape {planned[tensor.names]}, "
                f"the model's has {tensor.type.shape}"
            )
    for entry, op in zip(plan.operators, graph.ops, strict=False):
        if entry.kind != op.kind:
            return f"its operator {entry.name} is {entry.kind}, the model has {op.kind} there"
    if len(plan.operators) != len(graph.ops):
        return f"it has {len(plan.operators)} operators, the model {len(graph.ops)}"
    return "shapes, dtypes or constants differ (another batch size, sequence length or dtype?)"
