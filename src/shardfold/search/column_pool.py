"""A problem with only those choices of its vertices that good answers have taken so far.

Vertices with the same tables share their choices, so what folds still folds; those with at most
one neighbour keep all, as they cost next to nothing. A problem of a few choices a vertex is
solved in a small part of the time, and its choices are choices of the whole.

Primal repair: a better choice within the limit, from one that fits and one that does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardfold.search.interning import Array, Ints, Kinds, Mask
from shardfold.search.problem import Problem


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Per class of vertices, a stretch of `taken` that marks the choices known to be good."""

    problem: Problem
    of: Ints  # the class of each vertex
    first: Ints  # a vertex of each class
    start: Ints  # where the stretch of each class begins
    taken: Mask

    @staticmethod
    def of_none(problem: Problem) -> Pool:
        """No choice taken yet, but for all those of vertices with at most one neighbour."""
        kinds = problem.vertex_kinds.of
        if problem.byte_kinds is not None:
            kinds = kinds * max(len(problem.byte_kinds.tables), 1) + problem.byte_kinds.of
        _, first, of = np.unique(kinds, return_index=True, return_inverse=True)
        of = of.reshape(-1)
        lengths = problem.sizes[first]
        start = np.cumsum(lengths) - lengths
        degree = np.bincount(problem.ends.reshape(-1), minlength=len(problem))
        most = np.zeros(len(first), np.int64)
        np.maximum.at(most, of, degree)
        return Pool(problem, of, first, start, np.repeat(most <= 1, lengths))

    def add(self, choice: Ints) -> None:
        """Take what a choice takes, at all vertices that are alike."""
        self.taken[self.start[self.of] + choice] = True

    def narrowed(self) -> tuple[Problem, list[Ints]]:
        """The problem with the choices taken, and which those are by class."""
        lengths = self.problem.sizes[self.first]
        stretches = zip(self.start.tolist(), (self.start + lengths).tolist(), strict=True)
        kept = [np.flatnonzero(self.taken[low:high]) for low, high in stretches]
        return self.problem.narrowed(self.of, self.first, kept), kept

    def widened(self, choice: Ints, kept: list[Ints]) -> Ints:
        """A choice of the narrow problem as one of the whole."""
        lengths = np.array([len(k) for k in kept], dtype=np.int64)
        start = np.cumsum(lengths) - lengths
        return np.asarray(np.concatenate([*kept, np.zeros(0, np.int64)])[start[self.of] + choice])


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
