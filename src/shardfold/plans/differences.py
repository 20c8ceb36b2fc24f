"""What parts two choices for one problem: terms of the cost, and who is split otherwise."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from shardfold.costs.steps import Compute
from shardfold.graph import Graph
from shardfold.plans.assemble import Assembly
from shardfold.plans.explanation import Change, Term

SAME = 1e-12  # of the step: terms below are rounding


def terms(assembly: Assembly, v: int, other: Sequence[int]) -> tuple[Term, ...]:
    """Where the costs of `other` and of the assembly's choice differ, the largest part first.

    The operator of vertex v has its arithmetic and its collectives apart; every other term is an
    operator's own work, or all that a tensor or a parameter is moved and updated.
    """
    problem, tables, mine = assembly.tabulated.problem, assembly.tabulated, assembly.choice
    found: dict[str, float] = defaultdict(float)
    for u, vertex in enumerate(tables.vertices):
        if mine[u] == other[u]:
            continue
        if u == v:
            for label, seconds in _own(assembly, v, other[v]).items():
                found[label] += seconds
            continue
        change = float(problem.costs[u][other[u]] - problem.costs[u][mine[u]])
        is_operator = vertex.space is not None
        label = _work(assembly.graph, vertex.index) if is_operator else ""
        found[label or moves(assembly.graph, vertex.index)] += change
    for edge, table in zip(tables.edges, problem.edge_costs, strict=True):
        before = (mine[edge.source], mine[edge.target])
        after = (other[edge.source], other[edge.target])
        if before != after:
            found[moves(assembly.graph, edge.tensor)] += float(table[after] - table[before])
    least = SAME * problem.total(mine)
    kept = [Term(what, seconds) for what, seconds in found.items() if abs(seconds) > least]
    return tuple(sorted(kept, key=lambda term: -abs(term.seconds)))


def _own(assembly: Assembly, v: int, choice: int) -> dict[str, float]:
    """How much more arithmetic and communication vertex v has under `choice`."""
    vertex = assembly.tabulated.vertices[v]
    assert vertex.space is not None
    found: dict[str, float] = defaultdict(float)
    for sign, at in ((1, choice), (-1, assembly.choice[v])):
        for step in assembly.own(vertex.index, vertex.space, at):
            what = "its own arithmetic" if isinstance(step, Compute) else "its own collectives"
            found[what] += sign * assembly.price(step) * assembly.passes
    return found


def _work(graph: Graph, index: int) -> str:
    return f"the work of {place(graph, index)}"


def moves(graph: Graph, tensor: int) -> str:
    """A parameter's gathers, sums and update; or the reshards of what an operator makes."""
    found = graph.tensors[tensor]
    if found.role == "parameter":
        return f"sums and update of {found.name}"
    return f"moves of {found.name}"


def place(graph: Graph, index: int) -> str:
    """An operator by its module and kind, or by its name where its module is the model."""
    op = graph.ops[index]
    kind = op.kind.rpartition(".")[2]
    return f"{op.origin.module} {kind}" if op.origin.module else op.name


def changes(assembly: Assembly, v: int, other: Sequence[int]) -> tuple[Change, ...]:
    """The operators that `other` splits otherwise, the nearest to vertex v first."""
    found = []
    for u in _by_distance(assembly, v):
        vertex = assembly.tabulated.vertices[u]
        if u == v or vertex.space is None or assembly.choice[u] == other[u]:
            continue
        configs = vertex.space.configs
        before, after = (
            assembly.splits.of(vertex.index, vertex.space, configs[at].tolist())
            for at in (assembly.choice[u], other[u])
        )
        if before != after:
            op = assembly.graph.ops[vertex.index]
            found.append(Change(op.name, op.origin.module, op.kind, before, after))
    return tuple(found)


def _by_distance(assembly: Assembly, v: int) -> list[int]:
    """All vertices that edges join to v, nearest first."""
    neighbours: dict[int, list[int]] = defaultdict(list)
    for a, b in assembly.tabulated.problem.edges:
        neighbours[a].append(b)
        neighbours[b].append(a)
    seen, queue = {v: None}, deque([v])
    while queue:
        for u in neighbours[queue.popleft()]:
            if u not in seen:
                seen[u] = None
                queue.append(u)
    return list(seen)
