"""Which neighbours hold an operator to its split: what it would choose by itself, and who objects.

By itself operator v would take the configuration a with the least cost of its own; the plan has x.
If cost(a) < cost(x), then with all others as they are, each edge to a neighbour says how much more
it would cost with a: those with the most hold v where it is.
"""

from __future__ import annotations

from collections import defaultdict

from shardfold.plans.assemble import Assembly
from shardfold.plans.differences import moves
from shardfold.plans.explanation import Holding, Term

SAME = 1e-9  # of the step: differences below are rounding


def holding(assembly: Assembly, v: int, step_seconds: float) -> Holding | None:
    """What operator v would choose by itself, and who holds it back; None if it has its choice."""
    tables, problem = assembly.tabulated, assembly.tabulated.problem
    own, mine = problem.costs[v], assembly.choice[v]
    alone = int(own.argmin())
    saved = float(own[mine] - own[alone])
    space = tables.vertices[v].space
    assert space is not None
    if saved <= SAME * step_seconds:
        return None
    held: dict[str, float] = defaultdict(float)
    for edge, table in zip(tables.edges, problem.edge_costs, strict=True):
        if v not in (edge.source, edge.target):
            continue
        ends = (assembly.choice[edge.source], assembly.choice[edge.target])
        other = (alone, ends[1]) if edge.source == v else (ends[0], alone)
        held[moves(assembly.graph, edge.tensor)] += float(table[other] - table[ends])
    terms = [Term(what, more) for what, more in held.items() if more > SAME * step_seconds]
    return Holding(
        split=assembly.splits.of(tables.vertices[v].index, space, space.configs[alone].tolist()),
        saved_seconds=saved,
        holders=tuple(sorted(terms, key=lambda term: -term.seconds)),
    )
