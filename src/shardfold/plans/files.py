"""Plans as versioned JSON: readable in a diff, checked when read, never half written."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from shardfold.cluster import from_plain
from shardfold.errors import ClusterError, InputError, PlanError, nearest
from shardfold.graph import Graph
from shardfold.pipeline import SCHEDULES
from shardfold.plans.parts import check_choice
from shardfold.plans.plan import VERSION, PipelineEntry, Plan
from shardfold.simulate import Schedule
from shardfold.versioned_json import Document

FORMAT = "shardfold-plan"


def _anew(head: Mapping[str, Any]) -> str:
    """The command that makes a plan of version 1 again, as far as its file says how it was made."""
    made = head.get("provenance")
    made = made if isinstance(made, dict) else {}
    pinned = head.get("pinned")
    pins = pinned.get("pins") if isinstance(pinned, dict) else None
    words = ["shardfold", "plan", "MODEL", "--cluster", head.get("cluster", "CLUSTER")]
    for option in ("dtype", "optimizer", "cost"):
        value = made.get(option)
        if value not in (None, "as in the model", "measured"):
            words += [f"--{option}", value]
    if made.get("cost") == "measured":
        words += ["--profile", "PROFILE.json"]
    for pin in pins if isinstance(pins, list) else []:
        if isinstance(pin, dict):
            words += ["--pin", f"{pin.get('pattern')}={pin.get('split')}"]
    command = shlex.join([str(word)[:200] for word in (*words, "--save", "plan.json")])
    return (
        f"Make it anew: {command}; with --memory-limit, --recompute and --micro-batches as they "
        "were, which version 1 did not keep."
    )


DOCUMENT = Document("plan", FORMAT, VERSION, PlanError, "plan again", oldest=VERSION, anew=_anew)


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


def same_everywhere(plan: Plan) -> str:
    """A plan as all ranks must have it: without how long it took to make."""
    made = msgspec.structs.replace(plan.provenance, capture_seconds=0.0, search_seconds=0.0)
    return dumps(msgspec.structs.replace(plan, provenance=made))


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
    """Parse and validate a plan: what is read later need not be doubted."""
    plan = DOCUMENT.decode(data, source, Plan)
    try:
        _check_parts(plan)
    except InputError as error:
        raise PlanError(f"{source} is damaged: {error}") from error
    return plan


def _check_parts(plan: Plan) -> None:
    """Refuse parts of a plan that contradict one another."""
    cluster = from_plain(plan.provenance.cluster)
    levels = [level.name for level in cluster.levels]
    if plan.pipeline is not None:
        _check_follows(plan.pipeline)
    for axis in chain(plan.mesh, *plan.meshes_of_parts):
        if axis.level not in levels:
            raise ClusterError(
                f"axis {axis.name} lies on the level {axis.level!r}, but the cluster has "
                f"{', '.join(levels) or 'none'}."
            )
    if plan.processes != cluster.size:
        what = "its mesh has" if plan.pipeline is None else "the parts of its pipeline have"
        raise ClusterError(f"{what} {plan.processes:,} devices, its cluster {cluster.size:,}.")
    if plan.pipeline is not None:
        _check_pipeline(plan.pipeline)
        for choice in plan.pipeline.choices:
            check_choice(plan, choice)
    plan.provenance.request.check()
    if plan.schedule is not None:
        _check_schedule(plan.schedule)
    if plan.sketch is not None:
        _check_pieces(plan)


def _check_follows(entry: PipelineEntry) -> None:
    if entry.follows and len(entry.follows) != entry.parts:
        raise PlanError(
            f"its pipeline has {entry.parts} parts, and says of {len(entry.follows)} what they "
            "follow."
        )
    if any(number >= len(entry.choices) for number in entry.follows):
        raise PlanError(f"a part of its pipeline follows none of {len(entry.choices)} choices.")


def _check_pipeline(entry: PipelineEntry) -> None:
    if entry.schedule not in SCHEDULES:
        known = nearest(entry.schedule, SCHEDULES)
        raise PlanError(f"its pipeline has the schedule {entry.schedule!r}. {known}")
    if len(entry.layers) != entry.parts * entry.chunks:
        raise PlanError(
            f"its pipeline has {entry.parts} parts of {entry.chunks} chunks, and lists the layers "
            f"of {len(entry.layers)} stages."
        )
    if entry.seconds and len(entry.seconds) != len(entry.layers):
        raise PlanError(
            f"its pipeline has {len(entry.layers)} stages, and the times of {len(entry.seconds)}."
        )
    if any(part >= entry.parts for each in entry.tied for part in each.parts):
        raise PlanError(f"its pipeline of {entry.parts} parts sums gradients over others.")


def _check_schedule(schedule: Schedule) -> None:
    for segment in schedule.segments:
        if segment.names and len(segment.names) != segment.count:
            raise PlanError(f"segment {segment.name} has {len(segment.names)} names.")
        for op in segment.operators:
            again = chain.from_iterable(each.tasks for each in op.again)
            for task in chain(op.forward, op.backward, op.update, again):
                if not all(0 <= level < len(schedule.levels) for level in task.levels):
                    raise PlanError(f"a task of {op.name} crosses levels {task.levels}.")


def _check_pieces(plan: Plan) -> None:
    """The drawing's rows are those of the plan's operators: no more, and all there."""
    assert plan.sketch is not None
    sketch, drawn = plan.sketch, 0
    for rows, times in sketch.pieces:
        drawn += len(rows) * times
        _check_indices("row", rows, len(sketch.rows))
    _check_indices("face", (row.face for row in sketch.rows), len(sketch.faces))
    if drawn != len(plan.operators):
        raise PlanError(f"{drawn:,} operators are drawn, the plan has {len(plan.operators):,}.")


def _check_indices(what: str, numbers: Iterable[int], count: int) -> None:
    for number in numbers:
        if not 0 <= number < count:
            raise PlanError(f"the drawing has no {what} {number}: there are {count}.")


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
