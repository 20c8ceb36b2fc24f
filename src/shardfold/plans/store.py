"""Plans as versioned JSON: readable in a diff, checked when read, never half written."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import msgspec

from shardfold.errors import PlanError
from shardfold.graph import Graph
from shardfold.plans.plan import VERSION, Plan

FORMAT = "shardfold-plan"


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
    """Write to a file beside the target, then rename: a reader never sees a part."""
    target = Path(path)
    if not target.parent.is_dir():
        raise PlanError(f"Cannot write {target}: the folder {target.parent} does not exist.")
    try:
        _replace(target, dumps(plan))
    except OSError as error:
        raise PlanError(f"Cannot write {target}: {error.strerror}.") from error


def _replace(target: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load(path: str | Path, graph: Graph | None = None) -> Plan:
    """Read a plan file, and check it against a model's graph where one is given."""
    source = Path(path)
    try:
        data = source.read_bytes()
    except OSError as error:
        raise PlanError(f"Cannot read the plan {source}: {error.strerror}.") from error
    plan = loads(data, str(source))
    if graph is not None:
        check(plan, graph)
    return plan


def loads(data: bytes, source: str = "plan") -> Plan:
    """Parse and validate a plan; the version is looked at before anything else."""
    try:
        head = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise PlanError(f"{source} is not complete JSON ({error}): was it truncated?") from error
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise PlanError(f'{source} is not a shardfold plan: it has no "format": "{FORMAT}".')
    version = head.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise PlanError(
            f"{source} has plan version {version!r}; this shardfold reads up to {VERSION}. "
            "Upgrade shardfold, or plan again."
        )
    try:
        return msgspec.convert(head, Plan)
    except msgspec.ValidationError as error:
        raise PlanError(f"{source} is damaged: {error}.") from error


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
