"""Branch and bound within fixed memory, for problems whose tables would be too large.

    raise a dual bound by sweeps; read a choice off it;
    strike out every choice whose bound exceeds the best cost known;
    if what is left now fits into tables, eliminate it: done, and proven;
    else split on one vertex of the widest table, and go on with the part of lowest bound.

The lowest bound among the open parts is a lower bound on the whole at any time, so when time or
patience runs out the answer still states its gap. Memory: the problem's own tables, and for every
part that was split one vector per end of an edge, and the tables of which it has struck choices
out; an open part is made when it is looked at.

The dual bound comes from messages (TRW): how cheap the best choice can be at most, with no large
table. A message m moves cost from a pair to a vertex: t'(x, y) = t(x, y) - m_u(x) - m_v(y), and the
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

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from shardfold.search.elimination import (
    Factors,
    Forecast,
    Pairwise,
    eliminate,
    forecast,
    trace_back,
)
from shardfold.search.interning import Array, Ints, Mask
from shardfold.search.solution import Answer, Progress, Watch, ignore, reaches


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


SECONDS = 60.0
"""Time after which an unfinished search states its gap, unless the caller says otherwise."""

_STEPS = 200
_CHEAP = 2e6
_WORK = 4e9
"""Joint entries of an elimination that is done at once, and of one that is done when stuck."""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A part of the problem: which of the original choices it still has, and its messages."""

    kept: list[Ints]
    dual: Dual

    def held_at(self, vertex: int, x: int) -> _Part:
        """The part with `vertex` at its choice x."""
        masks = [np.ones(len(k), dtype=bool) for k in self.kept]
        masks[vertex] = np.arange(len(self.kept[vertex])) == x
        kept = list(self.kept)
        kept[vertex] = self.kept[vertex][x : x + 1]
        return _Part(kept, self.dual.restricted(masks))


@dataclass(slots=True, eq=False)
class _Search:
    """The best choice known, and what there is to spend."""

    table_bytes: float
    deadline: float
    watch: Watch
    best: list[int] = field(default_factory=list)
    cost: float = math.inf
    largest: float = 0.0
    stored: float = 0.0

    def offer(self, part: _Part, choice: list[int]) -> None:
        cost = part.dual.problem.total(choice)
        if cost < self.cost:
            self.best = [int(k[x]) for k, x in zip(part.kept, choice, strict=True)]
            self.cost = cost

    def is_late(self) -> bool:
        return time.process_time() > self.deadline


def bounded(
    factors: Factors, *, table_bytes: float, seconds: float = SECONDS, watch: Watch = ignore
) -> Answer:
    """A choice with a lower bound, or proven cheapest, using tables within `table_bytes` only."""
    whole = Pairwise.of(factors)
    search = _Search(table_bytes, time.process_time() + seconds, watch)
    root = _Part([np.arange(len(vector)) for vector in whole.unary], Dual(whole))
    heap: list[tuple[float, int, Callable[[], _Part]]] = [(-math.inf, 0, lambda: root)]
    count = done = 0
    while heap and not (done and search.is_late()):
        bound, _, make = heapq.heappop(heap)
        if reaches(search.cost, bound):
            continue
        done += 1
        tightened = _tighten(make(), bound, search)
        watch(Progress("bounded", done, done + len(heap), 0, search.cost))
        if tightened is None:
            continue
        bound, part, widest = tightened
        for child_bound, child in _split(part, bound, widest, search.cost):
            count += 1
            heapq.heappush(heap, (child_bound, count, child))
    open_bound = min((bound for bound, _, _ in heap), default=math.inf)
    gap = None if reaches(search.cost, open_bound) else open_bound
    choice = np.array(search.best, dtype=np.int64)
    return Answer(choice, gap, "bounds", int(search.largest), int(8 * search.stored))


def _tighten(part: _Part, bound: float, search: _Search) -> tuple[float, _Part, int] | None:
    """Sweep and strike out until the part is solved (None) or stuck: its bound, widest vertex."""
    factors = part.dual.problem.factors()
    plan = forecast(factors, "auto")
    for step in range(_STEPS):
        for sweep in range(1 + step):
            if sweep and search.is_late():
                break
            part.dual.sweep()
        search.offer(part, part.dual.rounded())
        raised, rises = part.dual.bound()
        smaller = _strike(part, raised, rises, search.cost)
        if smaller is None:
            return None
        if smaller is not part:
            part, factors = smaller, smaller.dual.problem.factors()
            shrunk = forecast(factors, "auto")
            is_stuck, plan = shrunk.work > plan.work / 2, shrunk
        else:
            is_stuck = True
        is_stuck &= raised <= bound + 0.02 * (search.cost - raised)
        bound = max(bound, raised)
        is_last = is_stuck or search.is_late()
        if _can_finish(plan, search.table_bytes, is_last):
            search.offer(part, _eliminated(factors, plan))
            search.largest = max(search.largest, plan.largest)
            search.stored = max(search.stored, plan.stored)
            return None
        if (is_last and step) or search.is_late():
            break
    return bound, part, _widest(factors, plan)


def _can_finish(plan: Forecast, table_bytes: float, is_last: bool) -> bool:
    return 8 * plan.stored <= table_bytes and plan.work <= (_WORK if is_last else _CHEAP)


def _strike(part: _Part, bound: float, rises: list[Array], cost: float) -> _Part | None:
    """The part without the choices that cannot beat `cost`; None when nothing is left."""
    slack = cost - bound - 1e-11 * abs(cost)
    masks: list[Mask] = [rise < slack for rise in rises]
    left = [int(np.count_nonzero(mask)) for mask in masks]
    if not all(left):
        return None
    if sum(left) == sum(len(rise) for rise in rises):
        return part
    kept = [k[mask] for k, mask in zip(part.kept, masks, strict=True)]
    return _Part(kept, part.dual.restricted(masks))


def _eliminated(factors: Factors, plan: Forecast) -> list[int]:
    chosen: dict[int, int] = {}
    trail, _ = eliminate(factors, plan.order)
    trace_back(trail, chosen)
    return [chosen[v] for v in range(len(factors.sizes))]


def _widest(factors: Factors, plan: Forecast) -> int:
    """The vertex to split on: in the largest table of the order, the one most others know."""
    near = factors.around()
    degree = [len(others) for others in near]
    largest, scope = -1.0, set[int]()
    for vertex in plan.order:
        mine = near[vertex]
        entries = sum(math.log(factors.sizes[u]) for u in mine)
        if entries > largest:
            largest, scope = entries, set(mine)
        for u in mine:
            near[u] |= mine
            near[u] -= {u, vertex}
    many = [u for u in scope if factors.sizes[u] > 1] or [
        u for u, size in enumerate(factors.sizes) if size > 1
    ]
    return max(many, key=lambda u: (degree[u], -u))


def _split(
    part: _Part, bound: float, vertex: int, cost: float
) -> Iterator[tuple[float, Callable[[], _Part]]]:
    """One part for each choice of `vertex` that may beat `cost`, and the bound it starts from."""
    raised, rises = part.dual.bound()
    for x, rise in enumerate(rises[vertex].tolist()):
        least = max(bound, raised + rise)
        if not reaches(cost, least):
            yield least, partial(part.held_at, vertex, x)
