"""The one reader of a plan's words: from a plan back to the rows that layouts are made of.

A plan says its choices in words (`dim 1.0`, `replicated`). Here they become states, checked against
the spaces of the model's own operators. The runner lowers the rows; the planner looks them up in
tables made anew, so that a plan can be priced again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from shardfold.cluster import Cluster, Mesh
from shardfold.cluster.mesh import Axis
from shardfold.costs import CostModel, Optimizer, Vertex, tabulate
from shardfold.costs.activations import KEEP_ALL, Regions, stated_regions
from shardfold.costs.decision_graph import shared_tensors
from shardfold.errors import PlanError, nearest
from shardfold.graph import Graph
from shardfold.plans.plan import Plan
from shardfold.sharding import Space, Subdims, space_of
from shardfold.sharding.configs import CONFIG_WORDS, NONE, leaves_no_part_empty, thinnest
from shardfold.sharding.layouts import STATE_WORDS, storable
from shardfold.simulate.decoded import DecodedChoice

Entry = TypeVar("Entry")
Row = tuple[int, ...]  # a state, or a factor, for each mesh axis
STATES = {word: state for state, word in STATE_WORDS.items()}
FACTORS = {word: factor for factor, word in CONFIG_WORDS.items()}


@dataclass(frozen=True, slots=True)
class Decisions:
    """Everything a plan decides, as rows over the mesh's axes."""

    mesh: Mesh
    configs: tuple[Space, ...]  # one configuration each
    shared: dict[int, Row]  # tensors with several readers, and the loss
    stored: dict[int, Row]  # parameters
    regathers: frozenset[int]
    regions: Regions = KEEP_ALL  # operators that run again before backward


def decisions_of(
    plan: Plan,
    graph: Graph,
    subdims: Subdims,
    mesh: Mesh | None = None,
    *,
    of_any_size: bool = False,
) -> Decisions:
    """Read the plan's choices, for a graph with the same operators; on another mesh, if given.

    A batch `of_any_size` may be cut more unevenly than is ever planned, but into no empty parts.
    """
    mesh = mesh or _own_mesh(plan)
    _check_count("operators", len(plan.operators), len(graph.ops))
    kept = {
        index: layout_row(tensor.layout, index, subdims, tensor.name, mesh)
        for index, tensor in _paired(shared_tensors(graph), plan.tensors, "tensors")
    }
    for index, row in kept.items() if of_any_size else ():
        _check_parts(row, subdims.tensors[index], graph.tensors[index].name, mesh)
    stored, regathers = {}, set()
    for index, parameter in _paired(graph.parameters(), plan.parameters, "parameters"):
        names = graph.tensors[index].names
        if parameter.names != names:
            raise PlanError(f"The plan has no parameter {names[0]}. Plan again.")
        stored[index] = _stored_row(parameter.layout, index, subdims, names[0], mesh)
        if parameter.regather:
            regathers.add(index)
    return Decisions(
        mesh,
        tuple(_config(plan, i, subdims, mesh, of_any_size) for i in range(len(graph.ops))),
        kept,
        stored,
        frozenset(regathers),
        stated_regions(plan.recompute, graph, subdims),
    )


def tables_for(
    plan: Plan, graph: Graph, subdims: Subdims, mesh: Mesh, model: CostModel, optimizer: Optimizer
) -> DecodedChoice:
    """Tables made anew with the plan's recomputation and micro-batches, and no choice yet."""
    again = stated_regions(plan.recompute, graph, subdims)
    given = (graph, subdims, mesh, model, optimizer, again)
    tables = tabulate(*given, micro_batches=plan.micro_batches)
    return DecodedChoice(graph, subdims, tables, (0,) * len(tables.vertices), model, optimizer)


def restated(
    plan: Plan, graph: Graph, subdims: Subdims, mesh: Mesh, model: CostModel, optimizer: Optimizer
) -> DecodedChoice:
    """The plan's choice on tables made anew, on a mesh with as many axes as its own."""
    blank = tables_for(plan, graph, subdims, mesh, model, optimizer)
    return replace(blank, choice=recalled(plan, blank))


def recalled(plan: Plan, decoded: DecodedChoice) -> tuple[int, ...]:
    """The plan's choice for every vertex of a graph with the same operators.

    The decoded choice itself does not matter. A configuration or a layout that a hand-edited plan
    names and that is not on offer is an error.
    """
    tables = decoded.tables
    decided = decisions_of(plan, decoded.graph, decoded.subdims, tables.mesh)
    known: dict[object, dict[Row, int]] = {}
    choice = []
    for vertex in tables.vertices:
        key = (id(vertex.layouts), id(vertex.storage), id(vertex.space and vertex.space.configs))
        if key not in known:
            known[key] = {row: number for number, row in enumerate(_offered(vertex))}
        wanted = _decided(vertex, decided)
        if wanted not in known[key]:
            raise _absent(vertex, decoded, len(known[key]))
        choice.append(known[key][wanted])
    return tuple(choice)


def layout_row(layout: Sequence[str], tensor: int, subdims: Subdims, name: str, mesh: Mesh) -> Row:
    """A layout in words as the states of one tensor."""
    if len(layout) != len(mesh.axes):
        raise PlanError(
            f"{name} is laid out on {len(layout)} axes, the plan's mesh has {len(mesh.axes)}."
        )
    return tuple(_state(word, tensor, subdims, name) for word in layout)


def _stored_row(layout: Sequence[str], tensor: int, subdims: Subdims, name: str, mesh: Mesh) -> Row:
    """The same for a parameter, as DTensor must be able to say it."""
    row = layout_row(layout, tensor, subdims, name, mesh)
    pieces = subdims.tensors[tensor]
    if storable(row, pieces, subdims.dims[tensor], mesh.shape) != row:
        raise PlanError(
            f"{name} is stored as {', '.join(layout)} on the mesh {mesh}, of pieces "
            f"{' x '.join(map(str, pieces))}: DTensor can split an inner piece of a dim over one "
            "axis only, the last that splits the dim, and evenly. Plan again."
        )
    return row


def mesh_on(plan: Plan, cluster: Cluster) -> Mesh:
    """The plan's mesh on the levels of its cluster."""
    levels = [level.name for level in cluster.levels]
    return Mesh(tuple(Axis(a.name, a.size, levels.index(a.level)) for a in plan.mesh))


def _own_mesh(plan: Plan) -> Mesh:
    levels = list(dict.fromkeys(axis.level for axis in plan.mesh))
    return Mesh(tuple(Axis(a.name, a.size, levels.index(a.level)) for a in plan.mesh))


def _paired(indices: list[int], entries: tuple[Entry, ...], what: str) -> list[tuple[int, Entry]]:
    """The plan lists them in the graph's own order; names need not be unique."""
    _check_count(what, len(entries), len(indices))
    return list(zip(indices, entries, strict=True))


def _check_count(what: str, stated: int, needed: int) -> None:
    if stated != needed:
        raise PlanError(f"The plan decides on {stated} {what}, the model has {needed}. Plan again.")


def _check_parts(row: Row, sizes: Sequence[int], name: str, mesh: Mesh) -> None:
    for k in {state for state in row if state >= 0}:
        axes = [axis.size for axis, state in zip(mesh.axes, row, strict=True) if state == k]
        if not thinnest(sizes[k], axes):
            raise PlanError(
                f"{name} has {sizes[k]} points where the plan splits it {math.prod(axes)} ways: a "
                "part would be empty."
            )


def _config(plan: Plan, index: int, subdims: Subdims, mesh: Mesh, of_any_size: bool) -> Space:
    """The operator's space with the plan's configuration alone, if it is a legal one."""
    entry, rule = plan.operators[index], subdims.rules[index]
    if len(entry.config) != len(mesh.axes):
        raise PlanError(
            f"Operator {entry.name} is configured on {len(entry.config)} axes, "
            f"the plan's mesh has {len(mesh.axes)}."
        )
    row = []
    for name in entry.config:
        if name not in FACTORS and name not in rule.factors:
            if of_any_size:
                raise PlanError(
                    f"Operator {entry.name} ({entry.kind}) is split by {name!r}, a dim that has a "
                    "single point here: a part would be empty."
                )
            raise PlanError(
                f"Operator {entry.name} ({entry.kind}) has no factor {name!r}. "
                f"{nearest(name, rule.factors)}"
            )
        row.append(FACTORS[name] if name in FACTORS else rule.factors.index(name))
    single = Space(rule, np.array([row], dtype=np.int8).reshape(1, len(row)))
    if all(f == NONE for f in row):
        return single
    if not (leaves_no_part_empty(rule, row, mesh) if of_any_size else _is_offered(single, mesh)):
        sizes = ", ".join(f"{f}={n}" for f, n in zip(rule.factors, rule.sizes, strict=True))
        raise PlanError(
            f"Operator {entry.name} ({entry.kind}) cannot be split as {' '.join(entry.config)} "
            f"on the mesh {mesh}: its rule is {rule.rule}, with {sizes}."
        )
    return single


def _is_offered(single: Space, mesh: Mesh) -> bool:
    offered = space_of(single.rule, mesh).configs
    return bool((offered == single.configs).all(axis=1).any())


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


def _decided(vertex: Vertex, decided: Decisions) -> Row:
    """The row of a vertex; of a parameter, with whether it is gathered again in backward."""
    if vertex.space is not None:
        return tuple(decided.configs[vertex.index].configs[0].tolist())
    if vertex.storage is not None:
        return (*decided.stored[vertex.index], int(vertex.index in decided.regathers))
    return decided.shared[vertex.index]


def _offered(vertex: Vertex) -> list[Row]:
    """The rows of a vertex's choices."""
    if vertex.space is not None:
        return [tuple(row) for row in vertex.space.configs.tolist()]
    assert vertex.layouts is not None
    rows = vertex.layouts.tolist()
    if vertex.storage is None:
        return [tuple(row) for row in rows]
    again = vertex.storage.regathers.tolist()
    return [(*row, int(regather)) for row, regather in zip(rows, again, strict=True)]


def _absent(vertex: Vertex, decoded: DecodedChoice, offered: int) -> PlanError:
    graph = decoded.graph
    names = (graph.ops if vertex.space is not None else graph.tensors)[vertex.index]
    return PlanError(
        f"What the plan has for {names.name} is not among the {offered} choices that are on offer "
        f"on the mesh {decoded.tables.mesh}."
    )
