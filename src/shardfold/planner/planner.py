"""From a graph to a plan's choice: what the search settles on, held against all finalists.

The search's limit is on a sum of bytes, the plan's on the simulated peak. A limit that no sum
meets may still be met by a peak, so then the search is asked for all it can find, and only the
simulation refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardfold.errors import InfeasibleError
from shardfold.graph import Graph
from shardfold.planner.mesh_search import HINT, Candidate, Chosen, Recompute
from shardfold.planner.partial_recompute import spare
from shardfold.planner.proposals import Field
from shardfold.planner.refine import polish
from shardfold.planner.request import Request, Settled, settle
from shardfold.planner.select import Judge, Verdict
from shardfold.sharding import Subdims

SHARES = (0.7, 0.9, 1.0, 1.0)  # of the smallest peak so far: limits that are tried before a refusal


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice of a plan, for which graph, and the simulator's verdict on it."""

    graph: Graph
    subdims: Subdims
    chosen: Chosen
    verdict: Verdict | None = None
    searched: Chosen | None = None  # what the sum alone chooses
    free: Decision | None = None  # only with pins: the decision without them

    @property
    def step_seconds(self) -> float:
        """The simulated step, or the sum where the costs know no overlap."""
        return self.chosen.best.solution.cost if self.verdict is None else self.verdict.winner.rank


def decide(graph: Graph, request: Request, watch: Callable[[int, int], None]) -> Decision:
    """The fastest simulated step that fits; by the sum alone where the costs know no overlap.

    Pins are held against the decision without them, and against its baselines.
    """
    decision = _decided(graph, request, watch)
    if not request.pins:
        return decision
    free = _decided(graph, replace(request, pins=()), watch)
    verdict = decision.verdict
    if verdict is not None and free.verdict is not None:
        hands = tuple(j for j in free.verdict.finalists if j.finalist.is_by_hand)
        verdict = replace(verdict, held_against=hands)
    return replace(decision, verdict=verdict, free=free)


def _decided(graph: Graph, request: Request, watch: Callable[[int, int], None]) -> Decision:
    if not request.pricing.overlaps:
        settled = settle(graph, request, watch)
        return Decision(settled.graph, settled.subdims, settled.chosen)
    judge = Judge(request.cluster, request.optimizer)
    verdict, searched = _attempt(graph, request, watch, judge)
    if request.recompute == "auto" and not request.pins:
        verdict = spare(verdict, request, judge)
    if not request.pins:
        verdict = polish(verdict, judge)
    limit, needed = request.limit_bytes, verdict.chosen.smallest_bytes
    if needed is not None and limit is not None:
        verdict = _smallest(graph, request, watch, judge, verdict)
        needed = verdict.winner.simulation.peak_bytes
        if needed > limit:
            raise InfeasibleError(needed_bytes=needed, limit_bytes=limit, hint=HINT)
    at = verdict.winner.finalist.field
    return Decision(at.graph, at.subdims, verdict.chosen, verdict, searched)


def _attempt(
    graph: Graph, request: Request, watch: Callable[[int, int], None], judge: Judge
) -> tuple[Verdict, Chosen]:
    """The best of the finalists under the limit, whether it fits or not."""
    found = _settled(graph, request, watch)
    fields = _fields(found)
    verdict = judge.decide(fields, found.chosen)
    if verdict.chosen.smallest_bytes is not None and _may_recompute(request, fields):
        again = settle(graph, replace(request, limit_bytes=None, recompute="always"), watch)
        fields = [*fields, Field(again.graph, again.subdims, again.chosen.tried)]
        verdict = judge.decide(fields, found.chosen)
    return verdict, found.chosen


def _smallest(
    graph: Graph,
    request: Request,
    watch: Callable[[int, int], None],
    judge: Judge,
    verdict: Verdict,
) -> Verdict:
    """The plan with the smallest peak: from the fewest bytes on, as long as less is met.

    It does not depend on the limit that was asked for, so what is said to be needed is met.
    """
    unlimited = _unlimited(graph, request, watch)
    fields = [Field(each.graph, each.subdims, each.chosen.tried) for each in unlimited]
    best = judge.least(fields)
    for share in SHARES:
        lower = min(share * best.simulation.peak_bytes, best.simulation.peak_bytes - 1)
        found, _ = _attempt(graph, replace(request, limit_bytes=lower), watch, judge)
        best = min((best, *found.finalists), key=lambda j: j.simulation.peak_bytes)
    settled = replace(verdict.chosen, best=best.finalist.candidate, smallest_bytes=None)
    return Verdict(settled, best, (*verdict.finalists, best))


def _may_recompute(request: Request, fields: Sequence[Field]) -> bool:
    """Whether recomputing blocks is allowed, and was not tried."""
    tried = any(c.tabulated.regions for each in fields for c in each.candidates)
    return request.recompute == "auto" and not request.pins and not tried


def _settled(graph: Graph, request: Request, watch: Callable[[int, int], None]) -> Settled:
    """What the search finds; where its sum of bytes exceeds a given limit, whatever there is."""
    try:
        return settle(graph, request, watch)
    except InfeasibleError:
        if request.limit_bytes is None:
            raise
    limit, found = request.limit_bytes, _unlimited(graph, request, watch)
    tried = tuple(c for each in found for c in each.chosen.tried)
    return replace(found[0], chosen=replace(found[0].chosen, tried=tried, limit_bytes=limit))


def _unlimited(graph: Graph, request: Request, watch: Callable[[int, int], None]) -> list[Settled]:
    """What the search finds without a limit, with everything kept and with all recomputed."""
    auto: tuple[Recompute, ...] = ("never", "always")
    ways = auto if request.recompute == "auto" and not request.pins else (request.recompute,)
    return [settle(graph, replace(request, limit_bytes=None, recompute=w), watch) for w in ways]


def _fields(settled: Settled) -> list[Field]:
    """The candidates by the graph that they are for."""
    return [Field(settled.graph, settled.subdims, _distinct(settled.chosen.tried))]


def _distinct(tried: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """One candidate for each mesh and for what it recomputes."""
    return tuple({(str(c.mesh), bool(c.tabulated.regions)): c for c in tried}.values())
