"""The least additive cost over all meshes of a cluster, within the memory of a device.

Each mesh is first solved without the limit: that is fast, proven, and a lower bound for whatever
the limit allows. Only meshes that could still win are then solved within the limit, first with all
activations kept, then with repeated blocks recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from shardfold.costs.activations import KEEP_ALL, Regions
from shardfold.errors import InfeasibleError, InputError
from shardfold.planner.case import Candidate, Case, Cases, Findings, ResolvedRequest
from shardfold.planner.select import HINT, Selection, least_seconds
from shardfold.search import Solution, unproven
from shardfold.search.subproblem import restrict
from shardfold.sharding.names import Splits
from shardfold.strategies.pins import Refusal, held, refused

Watch = Callable[[int, int], None]


def search_meshes(cases: Cases, request: ResolvedRequest, watch: Watch) -> Selection:
    """Solve on every mesh, and select the least additive cost that fits.

    Without an explicit limit, the device's memory less a reserve binds where it can be met, and
    a model that cannot fit still gets its fastest choice, which says so.
    """
    return _MeshSearch(cases, request, watch).select()


class _MeshSearch:
    """One search on all meshes."""

    def __init__(self, cases: Cases, request: ResolvedRequest, watch: Watch) -> None:
        self.cases, self.request, self.watch = cases, request, watch
        self.count = len(request.meshes)

    def select(self) -> Selection:
        """The fastest that fits; where nothing does and no limit was given, the fastest.

        Recomputing only ever adds time, so it is looked at only where the limit binds.
        """
        limit, recompute = self.request.limit, self.request.recompute
        keeping = self._solve(self.cases.recomputed_by(recompute))
        fastest = min(keeping, key=_cost)
        if not _cost(fastest) > 0:
            raise InputError(
                "By these prices the model trains in no time, and no plan is better than another: "
                "a cost model has to price local work, too."
            )
        if fastest.peak_bytes <= limit:
            return Selection(fastest, tuple(keeping), fastest, limit)
        kept = self._within(keeping)
        cutoff = min((_cost(c) for c in kept if c.peak_bytes <= limit), default=inf)
        blocks = self.cases.blocks if recompute == "auto" else KEEP_ALL
        again = self._within(self._solve(blocks, cutoff), cutoff) if blocks else []
        fitting = [c for c in (*kept, *again) if c.peak_bytes <= limit]
        if not fitting:
            least = (c.least_bytes for c in (*kept, *again))
            needed = min((size for size in least if size is not None), default=inf)
            if self.request.limit_bytes is not None:
                raise InfeasibleError(needed_bytes=needed, limit_bytes=limit, hint=HINT)
            return Selection(fastest, tuple(keeping), fastest, limit, smallest_bytes=needed)
        best = min(fitting, key=_cost)
        # Recomputing some blocks and not others is not tried here, and costs no less than this.
        floor = fastest.solution.lower_bound if again else None
        return Selection(best, (*kept, *again), best, limit, floor_seconds=floor)

    def _solve(self, regions: Regions, cutoff: float = inf) -> list[Candidate]:
        """The least additive cost on every mesh that allows the pins, whatever it holds."""
        found: list[Candidate] = []
        refusals: dict[str, Refusal] = {}
        for number in range(self.count):
            self.watch(number, 2 * self.count)
            case = self.cases.on(number, regions, self.request)
            if not self.request.pins:
                found.append(Candidate(case, _solve_case(case, cutoff)))
                continue
            splits = Splits(case.graph, case.subdims, case.mesh)
            kept, refusal = held(self.request.pins, splits, case.tables)
            if refusal is None:
                allowed = restrict(case.tables.problem, kept)
                pinned = replace(case, allowed=allowed, findings=Findings())
                found.append(Candidate(pinned, pinned.solve()))
            else:
                refusals[str(case.mesh)] = refusal
        if refusals and not found:
            raise refused(refusals, self.cases.scheduler.graph)
        return found

    def _within(self, candidates: Sequence[Candidate], best: float = inf) -> list[Candidate]:
        """The candidates, solved within the limit where they exceed it and could still win."""
        found, limit = list(candidates), self.request.limit
        for number, k in enumerate(sorted(range(len(found)), key=lambda k: _cost(found[k]))):
            self.watch(self.count + number, 2 * self.count)
            if found[k].peak_bytes > limit and _cost(found[k]) < best:
                found[k] = _solve_within(found[k], limit, best)
            if found[k].peak_bytes <= limit:
                best = min(best, _cost(found[k]))
        return found


def _cost(candidate: Candidate) -> float:
    return candidate.solution.cost


def _solve_case(case: Case, cutoff: float) -> Solution:
    """The best choice; where none can be cheaper than `cutoff`, the smallest, with that proof."""
    floor = least_seconds(case.allowed.problem) if cutoff < inf else -inf
    if floor < cutoff:
        return case.solve()
    smallest = case.solve_smallest()
    return unproven(case.allowed.problem, smallest.choice, "smallest", floor)


def _solve_within(free: Candidate, limit: float, cutoff: float) -> Candidate:
    """The candidate's case within the limit; as it was, where nothing is."""
    case, fastest = free.case, free.solution
    try:
        found = case.solve_within(limit, fastest=fastest, cutoff=cutoff)
    except InfeasibleError as error:
        return replace(free, least_bytes=error.needed_bytes + case.fixed_bytes)
    return replace(free, solution=found)
