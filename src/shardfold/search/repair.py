"""Primal repair: a better choice within the limit, from one that fits and one that does not."""

from __future__ import annotations

import numpy as np

from shardfold.search.kinds import Array, Ints, Kinds
from shardfold.search.problem import Problem


def splice(problem: Problem, first: Ints, second: Ints, limit: float) -> Ints | None:
    """The cheapest within `limit` that follows `first` up to some vertex and `second` after it.

    Neighbouring vertices have near numbers in problems that come from networks, so a cut changes
    few edges. All cuts are priced at once: each vertex and each edge adds its change at the
    numbers where the cut passes it.
    """
    costs = _along(problem, first, second, problem.vertex_kinds, problem.edge_kinds)
    sizes = _along(problem, first, second, problem.byte_kinds, problem.edge_byte_kinds)
    costs[sizes > limit] = np.inf
    cut = int(np.argmin(costs))
    if not np.isfinite(costs[cut]):
        return None
    return np.concatenate([first[:cut], second[cut:]])


def _along(
    problem: Problem, first: Ints, second: Ints, vertex: Kinds | None, edge: Kinds | None
) -> Array:
    """Total for every cut 0..n: vertices before the cut follow `first`, the rest `second`."""
    change = np.zeros(len(problem) + 1)
    if vertex is not None:
        change[0] += vertex.at(second).sum()
        change[1:] += vertex.at(first) - vertex.at(second)
    if edge is not None and len(problem.ends):
        low, high = problem.ends.min(axis=1), problem.ends.max(axis=1)
        turned = problem.ends[:, 0] > problem.ends[:, 1]
        both_second = edge.at(second[problem.ends[:, 0]], second[problem.ends[:, 1]])
        both_first = edge.at(first[problem.ends[:, 0]], first[problem.ends[:, 1]])
        source = np.where(turned, second[problem.ends[:, 0]], first[problem.ends[:, 0]])
        target = np.where(turned, first[problem.ends[:, 1]], second[problem.ends[:, 1]])
        across = edge.at(source, target)
        change[0] += both_second.sum()
        np.add.at(change, low + 1, across - both_second)
        np.add.at(change, high + 1, both_first - across)
    return np.cumsum(change)
