"""Seconds that no step goes below, read off tables without a search.

Local work is never hidden, and every decision costs at least its cheapest choice: the sum of those
is a floor of every sum and of every simulated step. An operator that runs again costs at least as
much more as its cheapest choice does.
"""

from __future__ import annotations

import numpy as np

from shardfold.costs import Tabulated
from shardfold.graph import Graph
from shardfold.graph.repeats import operator_order
from shardfold.search import Problem


def least_seconds(problem: Problem) -> float:
    """Every decision at its cheapest, and nothing moved."""
    kinds = problem.vertex_kinds
    least = np.array([table.min() for table in kinds.tables])
    return float(least[kinds.of].sum())


def more_seconds(graph: Graph, keeping: Tabulated, whole: Tabulated, border: int) -> float:
    """What is added at least by recomputing all that comes before an operator of the model.

    The tables `keeping` recompute nothing, and `whole` all that can be.
    """
    more = dict(_least(whole))
    for op, seconds in _least(keeping):
        more[op] -= seconds
    before = (op for op, _, _ in operator_order(graph)[:border])
    return sum(more[op] for op in before)


def _least(tables: Tabulated) -> list[tuple[int, float]]:
    """Every operator with the seconds of its cheapest choice."""
    pairs = zip(tables.vertices, tables.problem.costs, strict=True)
    return [(vertex.index, float(cost.min())) for vertex, cost in pairs if vertex.what == "op"]
