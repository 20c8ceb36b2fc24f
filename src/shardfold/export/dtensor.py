"""A plan as DTensor placements: of every parameter and every result, and of modules where it can.

    {"mesh": {"shape": [2, 4], "names": ["node", "gpu"]},
     "parameters": {"fc.weight": {"placements": ["Replicate()", "Shard(0)"], "regather": false}},
     "activations": [{"module": "fc", "op": "linear", "placements": [["Shard(0)", "Shard(1)"]]}],
     "parallelize_module": {"gpu": {"fc": "ColwiseParallel"}},
     "unsaid": []}

A placement is for each mesh axis, in order. A part of a dim that is not its first (of heads inside
fused weights) is no `Shard`: it is listed as unsaid, with the plan's own words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from shardfold.errors import PlanError
from shardfold.plans.drawing_data import expanded
from shardfold.plans.plan import Face, OperatorEntry, Plan

PIECE = re.compile(r"dim (\d+)(?:\.(\d+))?")
STYLES = {"Shard(0)": "ColwiseParallel", "Shard(1)": "RowwiseParallel"}  # of a linear's weight


def placement(word: str) -> str | None:
    """One state of a layout as DTensor says it; None where it does not.

    >>> placement("dim 1"), placement("dim 0.0"), placement("dim 0.1"), placement("partial")
    ('Shard(1)', 'Shard(0)', None, 'Partial()')
    """
    found = PIECE.fullmatch(word)
    if found is not None:
        return f"Shard({found[1]})" if found[2] in (None, "0") else None
    return "Partial()" if word == "partial" else "Replicate()"


def as_dtensor(plan: Plan) -> dict[str, Any]:
    """The plan's placements as plain values, ready for JSON."""
    unsaid: list[str] = []

    def placements(name: str, layout: Sequence[str]) -> list[str]:
        found = [placement(word) for word in layout]
        if None in found:
            unsaid.append(f"{name}: {', '.join(layout)}")
        return [each or word for each, word in zip(found, layout, strict=True)]

    parameters = {
        entry.names[0]: {
            "placements": placements(entry.names[0], entry.layout),
            "regather": entry.regather,
        }
        for entry in plan.parameters
    }
    activations = [
        {
            "module": op.module,
            "op": op.name,
            "placements": [placements(op.name, side.layout) for side in face.results],
        }
        for op, face in faced(plan)
    ]
    return {
        "mesh": {
            "shape": [axis.size for axis in plan.mesh],
            "names": [axis.name for axis in plan.mesh],
        },
        "micro_batches": plan.micro_batches,
        "parameters": parameters,
        "activations": activations,
        "parallelize_module": dict(_styles(plan)),
        "unsaid": unsaid,
    }


def faced(plan: Plan) -> Iterator[tuple[OperatorEntry, Face]]:
    """Every operator with its factors and layouts."""
    if plan.sketch is None:
        raise PlanError("The plan holds no layouts of activations: plan again.")
    for op, row in zip(plan.operators, expanded(plan.sketch), strict=True):
        yield op, plan.sketch.faces[row.face]


def words_on_axes(op: OperatorEntry, face: Face) -> list[str]:
    """What of an operator each mesh axis splits, in words; empty for none."""
    names = {name: word for name, word, _ in face.factors}
    return [names.get(factor, "") for factor in op.config]


def _styles(plan: Plan) -> Iterator[tuple[str, dict[str, str]]]:
    """For each axis, the linear layers that `parallelize_module` can split over it."""
    for number, axis in enumerate(plan.mesh):
        found = {}
        for op, face in faced(plan):
            weights = [side for side in face.operands if side.role == "parameter"]
            if op.kind != "aten.linear" or not op.module or not weights:
                continue
            style = STYLES.get(placement(weights[0].layout[number]) or "")
            if style is not None:
                found[op.module] = style
        if found:
            yield axis.name, found
