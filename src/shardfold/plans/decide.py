"""From a graph to a plan's choice: what the search settles on, held against all finalists.

The search's limit is on a sum of bytes, the plan's on the simulated peak. A limit that no sum
meets may still be met by a peak, so then the search is asked for all it can find, and only the
simulation refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardfold.costs.recompute import Regions
from shardfold.errors import InfeasibleError
from shardfold.graph import Graph
from shardfold.plans.choose import Candidate, Chosen, Recompute
from shardfold.plans.finalists import Field
from shardfold.plans.judge import Judge, Verdict
from shardfold.plans.settle import Request, Settled, settle
from shardfold.spaces import Atoms

HINT = "Try more devices, a smaller batch, or a dtype with fewer bytes."


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice of a plan, for which graph, and the simulator's verdict on it."""

    graph: Graph
    atoms: Atoms
    chosen: Chosen
    verdict: Verdict | None = None
    searched: Chosen | None = None  # what the sum alone chooses


def decide(graph: Graph, request: Request, watch: Callable[[int, int], None]) -> Decision:
    """The fastest simulated step that fits; by the sum alone where the costs know no overlap."""
    if not request.pricing.overlaps:
        settled = settle(graph, request, watch)
        return Decision(settled.graph, settled.atoms, settled.chosen)
    found = _settled(graph, request, watch)
    judge = Judge(request.cluster, request.optimizer)
    fields = _fields(found)
    verdict = judge.decide(fields, found.chosen)
    if verdict.chosen.smallest_bytes is not None and _may_recompute(request, fields):
        again = settle(graph, replace(request, limit_bytes=None, recompute="always"), watch)
        fields = [*fields, Field(again.graph, again.atoms, again.chosen.tried)]
        verdict = judge.decide(fields, found.chosen)
    needed = verdict.chosen.smallest_bytes
    if needed is not None and request.limit_bytes is not None:
        limit = request.limit_bytes
        raise InfeasibleError(needed_bytes=needed, limit_bytes=limit, hint=HINT)
    at = verdict.winner.finalist.field
    return Decision(at.graph, at.atoms, verdict.chosen, verdict, found.chosen)


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
    limit = request.limit_bytes
    auto: tuple[Recompute | Regions, ...] = ("never", "always")
    ways = auto if request.recompute == "auto" else (request.recompute,)
    found = [settle(graph, replace(request, limit_bytes=None, recompute=w), watch) for w in ways]
    tried = tuple(c for each in found for c in each.chosen.tried)
    return replace(found[0], chosen=replace(found[0].chosen, tried=tried, limit_bytes=limit))


def _fields(settled: Settled) -> list[Field]:
    """The candidates by the graph that they are for."""
    whole = settled.undivided or settled
    fields = [Field(whole.graph, whole.atoms, _distinct(whole.chosen.tried))]
    if settled.undivided is not None:
        fields.append(Field(settled.graph, settled.atoms, (settled.chosen.best,)))
    return fields


def _distinct(tried: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """One candidate for each mesh and for what it recomputes."""
    return tuple({(str(c.mesh), bool(c.tabulated.regions)): c for c in tried}.values())
