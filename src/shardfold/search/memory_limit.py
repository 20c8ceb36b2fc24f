"""Minimise cost within a memory limit: Lagrange weights, repair, then Pareto fronts to close in.

For any weight w >= 0,

    bound(w) = min over choices of (cost + w bytes) - w limit

is at most the best cost that fits, and its minimum is an ordinary problem that the exact search
solves. The best weight is found along the lower hull of (bytes, cost): from the fastest choice
(too large) and the smallest (fits), the weight of the line between them is tried and one of the
two replaced, until the line is the hull. Choices that fit are repaired into cheaper ones. What
gap remains is closed where that is affordable: choices of a vertex whose own bound exceeds the
best known are struck out, and the rest is searched with Pareto fronts.

In a large problem a solve takes long, so the hull is walked among the choices that good answers
take, and all choices are searched only at the weight found there.

The pool is a problem with only those choices of its vertices that good answers have taken so far.
Vertices with the same tables share their choices, so what folds still folds; those with at most one
neighbour keep all, as they cost next to nothing. A problem of a few choices a vertex is solved in a
small part of the time, and its choices are choices of the whole.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from shardfold.errors import InfeasibleError, ProblemError
from shardfold.search.branch_and_bound import SECONDS, Dual
from shardfold.search.elimination import Pairwise, cost_of, factors_of, forecast
from shardfold.search.exact import exact
from shardfold.search.interning import Array, Ints, Kinds, Mask
from shardfold.search.local_search import descend
from shardfold.search.pareto import Bounds, marginals, pareto
from shardfold.search.problem import Problem
from shardfold.search.solution import Answer, Progress, Watch, ignore, reaches


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


ROUNDS = 8
"""How often all choices are searched at most, after those that good answers take."""

_WEIGHTS = 40
_WIDTHS = (16, 512)
_SWEEPS = (2, 4, 8, 16)
_CLOSABLE = 3_000
_MARGINAL_WORK = 3e8
_FRONT_CELLS = 40_000

_SMALL = 4e6
_LARGE = 2e7
"""Entries of all edge tables up to which any gap is worth closing, and up to which a wide one is.

A sweep of dual bounds reads them twice, and thirty sweeps are made.
"""

_NARROW = 0.005
"""A gap that a plan can live with: less than the costs themselves are known to."""

_NO_MATTER = 1e-4
"""Part of the cost by which nobody cares to raise a bound."""

_ELASTICITY = 0.5
"""First guess of how many parts of the time one part of the bytes is worth."""


@dataclass(slots=True, eq=False)
class _Limited:
    """The state of the search: the best that fits, the bound, and the two ends of the hull."""

    problem: Problem
    limit: float
    table_bytes: float
    deadline: float
    cutoff: float
    entries: float
    best: Ints
    cost: float
    bound: float = -math.inf
    weight: float = 0.0
    pooled: float = -math.inf  # what bounds the choices that good answers take, and no others

    def offer(self, choice: Ints | None) -> None:
        """Keep a choice if it fits and is the cheapest so far."""
        if choice is None or self.problem.total_bytes(choice) > self.limit:
            return
        cost = self.problem.total(choice)
        if cost < self.cost:
            self.best, self.cost = choice, cost

    def solve(self, problem: Problem) -> tuple[Ints, float, float]:
        """Search on the way, in a part of the time left: the choice, its value, a proven bound."""
        left = self.deadline - time.process_time()
        found = exact(problem, table_bytes=self.table_bytes, seconds=max(left / 4, 1.0))
        value = problem.total(found.choice)
        return found.choice, value, value if found.lower_bound is None else found.lower_bound

    def solve_at(self, weight: float) -> tuple[Ints, float]:
        """The choice with bytes at a weight, and its value; the bound rises by what that proves."""
        choice, value, bound = self.solve(self.problem.blended(1.0, weight))
        if bound - weight * self.limit > self.bound:
            self.bound, self.weight = bound - weight * self.limit, weight
        self.offer(choice)
        return choice, value

    def is_closed(self) -> bool:
        return reaches(self.cost, self.bound)

    def is_enough(self) -> bool:
        """Whether the best is proven, or it is proven that nothing can beat the cutoff."""
        return self.is_closed() or self.bound > self.cutoff

    @property
    def gap(self) -> float:
        return (self.cost - self.bound) / max(abs(self.cost), math.ulp(0.0))

    @property
    def is_small(self) -> bool:
        """Whether any gap is worth closing."""
        return len(self.problem) <= _CLOSABLE and self.entries <= _SMALL

    @property
    def is_closable(self) -> bool:
        """Whether the gap that is left is worth the time that closing it would take."""
        is_wide = self.gap > _NARROW and len(self.problem) <= _CLOSABLE
        return self.is_small or (is_wide and self.entries <= _LARGE)


def limited(
    problem: Problem,
    limit: float,
    *,
    table_bytes: float,
    seconds: float = SECONDS,
    watch: Watch = ignore,
    fastest: Answer | None = None,
    cutoff: float = math.inf,
    known: list[Ints] | None = None,
    rounds: int = ROUNDS,
) -> Answer:
    """The cheapest choice whose bytes are within `limit`, and a bound on any such choice.

    `fastest` is the answer without a limit, where it is known. Once the bound exceeds `cutoff` the
    search stops with what it has. `known` are choices that are thought to be good; those of large
    problems that are met on the way are added. Large problems are searched with all their choices
    `rounds` times at most; without any, nothing is proven.
    """
    if not problem.has_bytes:
        raise ProblemError("A memory limit needs a problem whose choices carry bytes.")
    deadline = time.process_time() + 2 * seconds
    entries = _entries(problem)
    if fastest is None and entries <= _SMALL:
        fastest = exact(problem, table_bytes=table_bytes, seconds=seconds, watch=watch)
    if fastest is not None and problem.total_bytes(fastest.choice) <= limit:
        return fastest
    lightest = problem.blended(0.0, 1.0)
    smallest = exact(lightest, table_bytes=table_bytes, seconds=seconds, watch=watch)
    needed = problem.total_bytes(smallest.choice)
    if needed > limit:
        unproven = smallest.lower_bound is not None and smallest.lower_bound <= limit
        raise InfeasibleError(
            needed_bytes=needed,
            limit_bytes=limit,
            hint="That is the smallest found, not the smallest there is." * unproven
            or "Raise the limit, or give vertices choices that need less.",
        )
    cost = problem.total(smallest.choice)
    state = _Limited(problem, limit, table_bytes, deadline, cutoff, entries, smallest.choice, cost)
    if fastest is not None and fastest.lower_bound is not None:
        state.bound = fastest.lower_bound
    if fastest is not None and entries <= _SMALL:
        over, under = _hull(state, fastest.choice, smallest.choice, watch)
    else:
        good = [] if known is None else known
        good += [smallest.choice] if fastest is None else [smallest.choice, fastest.choice]
        over, under = _pooled(state, good, rounds, watch)
    _repair(state, over, under)
    if not state.is_enough() and state.is_closable:
        _close(state)
    proven = None if state.is_closed() else state.bound
    tables = (0, 0) if fastest is None else (fastest.largest_table, fastest.peak_bytes)
    return Answer(state.best, proven, "lagrange", *tables)


def _pooled(state: _Limited, good: list[Ints], rounds: int, watch: Watch) -> tuple[Ints, Ints]:
    """Find the weight among the choices that good answers take, and prove it with all of them.

    The hull of a pool of choices is walked in a small part of the time. A solve of the whole at
    the weight found there gives a bound that holds, and choices that the pool lacked; when it finds
    no better, the weight is the best of the whole.
    """
    pool = Pool.of_none(state.problem)
    for choice in good:
        pool.add(choice)
    over = under = state.best
    for step in range(rounds + 1):
        narrow, kept = pool.narrowed()
        inner = _narrow(state, narrow)
        ends = _walked(inner)
        over, under = (pool.widened(end, kept) for end in ends)
        state.pooled = inner.bound
        state.offer(pool.widened(inner.best, kept))
        left = state.deadline - time.process_time()
        if step == rounds or (step and (left <= 0 or _is_near(state, inner))):
            break
        choice, _ = state.solve_at(inner.weight)
        watch(Progress("limited", step + 1, rounds, best_cost=state.cost))
        good.append(choice)
        if state.is_enough() or _is_near(state, inner):
            break
        pool.add(choice)
    return over, under


def _is_near(state: _Limited, inner: _Limited) -> bool:
    """Whether the best is near the bound, or the pool's own bound shows that it can hardly rise."""
    return state.gap <= _NARROW / 10 or inner.bound - state.bound <= _NO_MATTER * abs(state.cost)


def _narrow(state: _Limited, problem: Problem) -> _Limited:
    """The state of a search among few choices."""
    smallest, _, _ = state.solve(problem.blended(0.0, 1.0))
    cost = problem.total(smallest)
    return _Limited(
        problem, state.limit, state.table_bytes, state.deadline, math.inf, math.inf, smallest, cost
    )


def _walked(state: _Limited) -> tuple[Ints, Ints]:
    """The ends of the hull where it crosses the limit; the fastest choice twice if that fits."""
    smallest = state.best
    fastest, _, state.bound = state.solve(state.problem)
    state.offer(fastest)
    if state.problem.total_bytes(fastest) <= state.limit:
        return fastest, fastest
    return _hull(state, fastest, smallest, ignore)


def _hull(state: _Limited, over: Ints, under: Ints, watch: Watch) -> tuple[Ints, Ints]:
    """Walk the lower hull to the line that crosses the limit; the choices at its two ends."""
    problem, smallest = state.problem, under
    guess = _ELASTICITY * problem.total(over) / problem.total_bytes(over)
    for step in range(_WEIGHTS):
        high, low = problem.total_bytes(over), problem.total_bytes(under)
        costs = problem.total(over), problem.total(under)
        weight = (costs[1] - costs[0]) / (high - low)
        # The smallest choice says nothing of what saving a little costs: guess until another fits.
        is_guess = under is smallest and 0.0 < guess < weight
        # Where the line between the two crosses the limit, the bound can rise no further.
        most = costs[0] + weight * (high - state.limit) - state.bound
        weight, guess = (guess, 2 * guess) if is_guess else (weight, guess)
        left = state.deadline - time.process_time()
        if weight <= 0 or (step and left <= 0):
            break
        if step and not state.is_small and most <= _NO_MATTER * abs(costs[0]):
            break
        choice, value = state.solve_at(weight)
        watch(Progress("limited", step + 1, _WEIGHTS, best_cost=state.cost))
        line = costs[0] + weight * high
        if not is_guess and value >= line - 1e-12 * abs(line):
            break
        if problem.total_bytes(choice) > state.limit:
            over = choice
        else:
            under = choice
        if state.is_enough() or (step and _is_spliced(state, over, under)):
            break
    return over, under


def _is_spliced(state: _Limited, over: Ints, under: Ints) -> bool:
    """Whether cutting the two ends together is already near enough; small problems go on."""
    if state.is_small:
        return False
    _splice(state, over, under)
    return state.gap <= _NARROW / 10


def _splice(state: _Limited, over: Ints, under: Ints) -> None:
    for first, second in ((over, under), (under, over)):
        state.offer(splice(state.problem, first, second, state.limit))


def _repair(state: _Limited, over: Ints, under: Ints) -> None:
    """Cut the two ends of the hull together, then improve vertex by vertex."""
    problem, limit = state.problem, state.limit
    _splice(state, over, under)
    is_near = state.gap <= _NARROW / 10 or state.pooled >= (1 - _NARROW / 10) * state.cost
    if len(problem) <= 10 * _CLOSABLE and (state.is_small or not is_near):
        state.offer(descend(problem, state.best, limit))
        if state.is_small:
            state.offer(descend(problem, under, limit))


def _entries(problem: Problem) -> float:
    """Entries of the tables of all edges."""
    sizes, ends = problem.sizes.astype(np.float64), problem.ends
    return float((sizes[ends[:, 0]] * sizes[ends[:, 1]]).sum())


def _close(state: _Limited) -> None:
    """Strike out what cannot beat the best, then search the rest with Pareto fronts."""
    problem = state.problem
    cost = Pairwise.of(factors_of(problem))
    size = Pairwise.of(factors_of(problem.blended(0.0, 1.0)))
    kept = _struck(state, _blend(cost, size, state.weight))
    if kept is None:
        state.bound = state.cost
        return
    for width in _WIDTHS:
        bounds, order, left = _bounds(state, *_shrunk(cost, size, kept))
        if bounds is None or not all(len(k) for k in left):
            if bounds is not None:
                state.bound = state.cost
            return
        kept = [k[mine] for k, mine in zip(kept, left, strict=True)]
        small_cost, small_size = _shrunk(cost, size, kept)
        bounds, order, left = _bounds(state, small_cost, small_size)
        if bounds is None or cost_of(small_cost.factors(), order, "").work > _FRONT_CELLS:
            return
        found, is_complete = pareto(small_cost, small_size, order, bounds, width)
        if found is not None:
            state.offer(np.array([k[x] for k, x in zip(kept, found, strict=True)]))
        if is_complete:
            state.bound = state.cost
            return


def _struck(state: _Limited, blend: Pairwise) -> list[Ints] | None:
    """The choices that dual bounds leave a chance of beating the best; None if none has any."""
    kept = [np.arange(len(vector)) for vector in blend.unary]
    top = state.cost + state.weight * state.limit
    dual = Dual(blend)
    for sweeps in _SWEEPS:
        for _ in range(sweeps):
            dual.sweep()
        bound, rises = dual.bound()
        masks = [rise < top - bound - 1e-11 * abs(top) for rise in rises]
        if not all(mask.any() for mask in masks):
            return None
        kept = [k[mask] for k, mask in zip(kept, masks, strict=True)]
        dual = dual.restricted(masks)
        if time.process_time() > state.deadline:
            break
    return kept


def _shrunk(cost: Pairwise, size: Pairwise, kept: list[Ints]) -> tuple[Pairwise, Pairwise]:
    """Both problems with the kept choices only, and the same pairs left in both."""
    return cost.restricted(kept).condensed(), size.restricted(kept).condensed()


def _bounds(
    state: _Limited, cost: Pairwise, size: Pairwise
) -> tuple[Bounds | None, tuple[int, ...], list[Ints]]:
    """What prunes the fronts, an order, and the choices of each vertex that can still matter."""
    factors = _blend(cost, size, state.weight).factors()
    plan = forecast(factors, "auto")
    if plan.work > _MARGINAL_WORK or 24 * plan.work > 4 * state.table_bytes:
        return None, plan.order, []
    blend = marginals(factors, plan.order)
    smallest = marginals(size.factors(), plan.order)
    bounds = Bounds(state.limit, state.cost, state.weight, blend, smallest)
    top = state.cost + state.weight * state.limit
    left = [
        np.flatnonzero((value < top - 1e-12 * abs(top)) & (least <= state.limit * (1 + 1e-12)))
        for value, least in zip(blend.best, smallest.best, strict=True)
    ]
    return bounds, plan.order, left


def _blend(cost: Pairwise, size: Pairwise, weight: float) -> Pairwise:
    unary = tuple(c + weight * s for c, s in zip(cost.unary, size.unary, strict=True))
    tables = tuple(c + weight * s for c, s in zip(cost.tables, size.tables, strict=True))
    return Pairwise(unary, cost.pairs, tables)
