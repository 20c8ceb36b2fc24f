"""Dual bounds by messages: how cheap the best choice can be at most, with no large table.

A message m moves cost from a pair to a vertex: t'(x, y) = t(x, y) - m_u(x) - m_v(y), and the
vertex vector grows by m. The total of every choice stays the same, so for any messages

    bound = sum over pairs of min over x, y of t'(x, y) + w_u c'_u(x) + w_v c'_v(y)

is at most the optimum, where the weights w share each vertex's vector out over its pairs.
Sequential sweeps (tree-reweighted message passing: a vertex passes its vector on in equal shares)
raise the bound; on a tree it reaches the optimum. With vertex v held at x the minimum of each of
its pairs is taken over y alone; once the bound so raised exceeds the cost of a known choice, x can
be struck out for good.

Work: the entries of all matrices, twice a sweep. Memory: one vector per end of a pair.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardfold.search.factors import Pairwise
from shardfold.search.interning import Array, Mask


class Dual:
    """Messages over a pairwise problem; `sweep` improves them, `bound` reads them."""

    def __init__(self, problem: Pairwise) -> None:
        self.problem = problem
        self._near = problem.incident()
        self._messages: dict[tuple[int, int], Array] = {
            (number, end): np.zeros(len(problem.unary[end]))
            for number, pair in enumerate(problem.pairs)
            for end in pair
        }

    def vector(self, vertex: int) -> Array:
        """The vertex's own costs and all that was moved to it."""
        total = self.problem.unary[vertex]
        for number, _ in self._near[vertex]:
            total = total + self._messages[number, vertex]
        return total

    def sweep(self) -> None:
        """Once forward and once back over all vertices."""
        vertices = range(len(self.problem.unary))
        for ahead, order in ((1, vertices), (-1, reversed(vertices))):
            for vertex in order:
                self._send(vertex, ahead)

    def _send(self, vertex: int, ahead: int) -> None:
        near = self._near[vertex]
        onward = [(number, u) for number, u in near if (u - vertex) * ahead > 0]
        if not onward:
            return
        share = self.vector(vertex) / max(len(onward), len(near) - len(onward))
        for number, u in onward:
            own = share - self._messages[number, vertex]
            message = (self.problem.seen_from(number, u) + own).min(axis=1)
            self._messages[number, u] = message - message.min()

    def bound(self) -> tuple[float, list[Array]]:
        """A lower bound on the optimum, and how much it rises for each choice of each vertex."""
        vectors = [self.vector(vertex) for vertex in range(len(self.problem.unary))]
        rises = [np.zeros(len(vector)) for vector in vectors]
        total = 0.0
        for vertex, vector in enumerate(vectors):
            if not self._near[vertex]:
                total += float(vector.min())
                rises[vertex] = vector - vector.min()
        for number, (u, v) in enumerate(self.problem.pairs):
            table = self._share(number, u, v, vectors[u])[:, None] + self.problem.tables[number]
            table += self._share(number, v, u, vectors[v])
            rows, columns = table.min(axis=1), table.min(axis=0)
            low = float(rows.min())
            total += low
            rises[u] += rows - low
            rises[v] += columns - low
        return total, rises

    def _share(self, number: int, vertex: int, other: int, vector: Array) -> Array:
        """What a pair gets of a vertex's vector when every vector is shared out over its pairs.

        A vertex lies on max(before, after) chains, each with an equal share of its vector; a chain
        that runs through it gives half to the pair before and half to the pair after.
        """
        near = self._near[vertex]
        before = sum(1 for _, u in near if u < vertex)
        after = len(near) - before
        few, many = min(before, after), max(before, after)
        is_among_few = (other < vertex) == (before <= after)
        weight = 1 / (2 * many) if few and is_among_few else (1 - few / (2 * many)) / many
        return np.asarray(vector * weight - self._messages[number, vertex])

    def rounded(self) -> list[int]:
        """A choice read off the messages, vertex by vertex, then improved one vertex at a time."""
        choice: list[int] = []
        for vertex, unary in enumerate(self.problem.unary):
            score = unary
            for number, u in self._near[vertex]:
                if u < vertex:
                    score = score + self.problem.seen_from(number, vertex)[:, choice[u]]
                else:
                    score = score + self._messages[number, vertex]
            choice.append(int(np.argmin(score)))
        self.descend(choice)
        return choice

    def descend(self, choice: list[int], passes: int = 10) -> None:
        """Move single vertices to their best choice given the others, while that helps."""
        for _ in range(passes):
            moved = False
            for vertex, unary in enumerate(self.problem.unary):
                score = unary
                for number, u in self._near[vertex]:
                    score = score + self.problem.seen_from(number, vertex)[:, choice[u]]
                best = int(np.argmin(score))
                if score[best] < score[choice[vertex]]:
                    choice[vertex], moved = best, True
            if not moved:
                return

    def restricted(self, masks: Sequence[Mask]) -> Dual:
        """The same messages on the choices that remain."""
        small = Dual(self.problem.restricted([np.flatnonzero(mask) for mask in masks]))
        for (number, end), message in self._messages.items():
            small._messages[number, end] = message[masks[end]]
        return small
