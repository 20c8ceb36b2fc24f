"""From a plan back to the choice that it states, on tables made anew from its model and cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardfold.cluster import Mesh
from shardfold.costs import CostModel, Optimizer, Vertex, tabulate
from shardfold.costs.recompute import stated_regions
from shardfold.errors import PlanError
from shardfold.graph import Graph
from shardfold.plans.entries import factor_name, layout_words
from shardfold.plans.plan import Plan
from shardfold.sharding import Subdims
from shardfold.simulate.decoded import Assembly

Words = tuple[object, ...]


def restated(
    plan: Plan, graph: Graph, subdims: Subdims, mesh: Mesh, model: CostModel, optimizer: Optimizer
) -> Assembly:
    """The plan's choice on tables made anew, on a mesh with as many axes as its own."""
    again = stated_regions(plan.recompute, graph, subdims)
    passes = plan.micro_batches
    tables = tabulate(graph, subdims, mesh, model, optimizer, again, passes=passes)
    blank = Assembly(graph, subdims, tables, (0,) * len(tables.vertices), model, optimizer)
    return replace(blank, choice=recalled(plan, blank))


def recalled(plan: Plan, assembly: Assembly) -> tuple[int, ...]:
    """The plan's choice for every vertex of a graph with the same operators.

    The assembly's own choice does not matter. A configuration or a layout that a hand-edited plan
    names and that is not on offer is an error.
    """
    stated = _stated(plan, assembly)
    known: dict[object, dict[Words, int]] = {}
    choice = []
    for v, vertex in enumerate(assembly.tabulated.vertices):
        name, wanted = stated[v]
        key = _key(vertex, assembly)
        if key not in known:
            known[key] = {words: row for row, words in enumerate(_offered(vertex, assembly))}
        if wanted not in known[key]:
            raise _absent(name, wanted, list(known[key]))
        choice.append(known[key][wanted])
    return tuple(choice)


def _stated(plan: Plan, assembly: Assembly) -> dict[int, tuple[str, Words]]:
    """What the plan says of each vertex: operators and tensors in order, parameters by name."""
    graph, vertices = assembly.graph, assembly.tabulated.vertices
    tensors = iter(plan.tensors)
    parameters = {entry.names: entry for entry in plan.parameters}
    _check_counts(
        ("operators", len(plan.operators), len(graph.ops)),
        ("tensors", len(plan.tensors), sum(vertex.what == "tensor" for vertex in vertices)),
    )
    found: dict[int, tuple[str, Words]] = {}
    for v, vertex in enumerate(vertices):
        if vertex.space is not None:
            operator = plan.operators[vertex.index]
            found[v] = (operator.name, operator.config)
        elif vertex.storage is not None:
            names = graph.tensors[vertex.index].names
            if names not in parameters:
                raise PlanError(f"The plan has no parameter {names[0]}. Plan again.")
            stored = parameters[names]
            found[v] = (names[0], (*stored.layout, stored.regather))
        else:
            tensor = next(tensors)
            found[v] = (tensor.name, tensor.layout)
    return found


def _check_counts(*counts: tuple[str, int, int]) -> None:
    for what, stated, needed in counts:
        if stated != needed:
            raise PlanError(
                f"The plan decides on {stated} {what}, the model has {needed}. Plan again."
            )


def _key(vertex: Vertex, assembly: Assembly) -> object:
    """Equal for vertices whose choices read alike."""
    if vertex.space is not None:
        return (id(vertex.space.configs), vertex.space.rule.factors)
    return (id(vertex.layouts), id(vertex.storage), assembly.subdims.dims[vertex.index])


def _offered(vertex: Vertex, assembly: Assembly) -> Iterator[Words]:
    """The vertex's choices, in the words of a plan."""
    if vertex.space is not None:
        for row in vertex.space.configs.tolist():
            yield tuple(factor_name(vertex.space, factor) for factor in row)
        return
    assert vertex.layouts is not None
    for row in range(len(vertex.layouts)):
        states = layout_words(assembly.subdims, vertex.index, vertex.layouts, row)
        again = () if vertex.storage is None else (bool(vertex.storage.regathers[row]),)
        yield (*states, *again)


def _absent(name: str, wanted: Words, offered: Sequence[Words]) -> PlanError:
    few = "; ".join(" ".join(map(str, words)) for words in offered[:6])
    return PlanError(
        f"The plan has {' '.join(map(str, wanted))!r} for {name}, which is not on offer. "
        f"Among the {len(offered)} that are: {few}."
    )
