"""From a plan back to rows: the configurations, layouts and storages that it chose.

A plan says its choices in words (`dim 1.0`, `whole`); here they become the states that layouts
are made of, checked against the spaces of the model's own operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from shardfold.cluster import Mesh
from shardfold.cluster.mesh import Axis
from shardfold.costs.recompute import KEEP_ALL, Regions, stated_regions
from shardfold.costs.variables import shared_tensors
from shardfold.errors import PlanError, nearest
from shardfold.graph import Graph
from shardfold.plans import Plan
from shardfold.runtime.shards import Row
from shardfold.sharding import Space, Subdims, space_of
from shardfold.sharding.configs import NONE, PASS
from shardfold.sharding.layouts import PENDING, REPLICATED, SHARED

Entry = TypeVar("Entry")
STATES = {"whole": REPLICATED, "whole, gradient summed": SHARED, "sum pending": PENDING}


@dataclass(frozen=True, slots=True)
class Decisions:
    """Everything a plan decides, as rows over the mesh's axes."""

    mesh: Mesh
    configs: tuple[Space, ...]  # one configuration each
    kept: dict[int, Row]  # tensors with several readers, and the loss
    stored: dict[int, Row]  # parameters
    regathers: frozenset[int]
    regions: Regions = KEEP_ALL  # operators that run again before backward


def decisions_of(plan: Plan, graph: Graph, subdims: Subdims) -> Decisions:
    """Read the plan's choices; the plan must already be known to be for this graph."""
    levels = list(dict.fromkeys(axis.level for axis in plan.mesh))
    mesh = Mesh(tuple(Axis(a.name, a.size, levels.index(a.level)) for a in plan.mesh))
    if len(plan.operators) != len(graph.ops):
        raise PlanError(
            f"The plan has {len(plan.operators)} operators, the model {len(graph.ops)}. Plan again."
        )
    kept = {}
    for index, tensor in _paired(shared_tensors(graph), plan.tensors, "tensors"):
        kept[index] = layout_row(tensor.layout, index, subdims, tensor.name, mesh)
    stored, regathers = {}, set()
    for index, parameter in _paired(graph.parameters(), plan.parameters, "parameters"):
        stored[index] = layout_row(parameter.layout, index, subdims, parameter.names[0], mesh)
        if parameter.regather:
            regathers.add(index)
    configs = tuple(_config(plan, i, subdims, mesh) for i in range(len(graph.ops)))
    return Decisions(
        mesh,
        configs,
        kept,
        stored,
        frozenset(regathers),
        stated_regions(plan.recompute, graph, subdims),
    )


def _paired(indices: list[int], entries: tuple[Entry, ...], what: str) -> list[tuple[int, Entry]]:
    """The plan lists them in the graph's own order; names need not be unique."""
    if len(indices) != len(entries):
        raise PlanError(
            f"The plan decides on {len(entries)} {what}, the model has {len(indices)}. Plan again."
        )
    return list(zip(indices, entries, strict=True))


def _config(plan: Plan, index: int, subdims: Subdims, mesh: Mesh) -> Space:
    """The operator's space with the plan's configuration alone, if it is a legal one."""
    entry, rule = plan.operators[index], subdims.rules[index]
    row = []
    if len(entry.config) != len(mesh.axes):
        raise PlanError(
            f"Operator {entry.name} is configured on {len(entry.config)} axes, "
            f"the plan's mesh has {len(mesh.axes)}."
        )
    for name in entry.config:
        if name in ("-", "+"):
            row.append(NONE if name == "-" else PASS)
        elif name in rule.factors:
            row.append(rule.factors.index(name))
        else:
            raise PlanError(
                f"Operator {entry.name} ({entry.kind}) has no factor {name!r}. "
                f"{nearest(name, rule.factors)}"
            )
    single = Space(rule, np.array([row], dtype=np.int8).reshape(1, len(row)))
    if any(f != NONE for f in row) and not _is_offered(single, mesh):
        raise PlanError(
            f"Operator {entry.name} ({entry.kind}) cannot be split as {' '.join(entry.config)} "
            f"on the mesh {mesh}: its rule is {rule.rule}."
        )
    return single


def _is_offered(single: Space, mesh: Mesh) -> bool:
    offered = space_of(single.rule, mesh).configs
    return bool((offered == single.configs).all(axis=1).any())


def layout_row(layout: Sequence[str], tensor: int, subdims: Subdims, name: str, mesh: Mesh) -> Row:
    """A layout in words as the states of one tensor."""
    if len(layout) != len(mesh.axes):
        raise PlanError(
            f"{name} is laid out on {len(layout)} axes, the plan's mesh has {len(mesh.axes)}."
        )
    return tuple(_state(word, tensor, subdims, name) for word in layout)


def _state(word: str, tensor: int, subdims: Subdims, name: str) -> int:
    """`dim 1.0` is the first piece of dim 1, `dim 1` all of it."""
    if word in STATES:
        return STATES[word]
    dims = subdims.dims[tensor]
    number, _, piece = word.removeprefix("dim ").partition(".")
    if word.startswith("dim ") and number.isdigit() and int(number) in dims:
        at = int(piece) if piece.isdigit() else 0
        if at < dims.count(int(number)):
            return dims.index(int(number)) + at
    raise PlanError(f"{name} has no layout {word!r}: its dims are in pieces {dims}.")
