"""The planning loop, top to bottom: from a captured model to the selected candidate.

No candidate here has pipeline stages: `with_stages.py` holds those against what is selected here.

    for micro-batches:        one, or as many as the memory limit asks for    micro_batches.py
        for meshes:           solve the additive problem, proven              mesh_search.py
        for proposers:        yield candidates that may win                   proposals.py
            simulate each:    its step with overlap, its peak of memory       case.py
        for meshes:           bound every step, simulate what that meets      step_bound.py
        for proposers:        hide communication, move the limit; then        proposals.py
            simulate each     recompute some operators, refine the winner     partial_recompute.py
                              (left out where the best meets its bound already)
        select:               what fits comes first, then the faster, then    select.py
                              of those that are nearly as fast the simpler

The search's limit is on a sum of bytes, the plan's on the simulated peak. A limit that no sum
meets may still be met by a peak, so then the search is asked for all it can find, and only the
simulation refuses. A cost model that knows no overlap has nothing to simulate: there the least
additive cost is selected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardfold.costs.measured import check_profile
from shardfold.errors import InfeasibleError
from shardfold.graph import Graph
from shardfold.planner.case import Candidate, Cases, ResolvedRequest, simulate
from shardfold.planner.mesh_search import Watch as MeshWatch
from shardfold.planner.mesh_search import search_meshes
from shardfold.planner.micro_batches import Captures, choose_micro_batches
from shardfold.planner.options import MicroBatches, Recompute
from shardfold.planner.partial_recompute import propose_recomputed
from shardfold.planner.proposals import (
    FIRST,
    FURTHER,
    PROPOSERS,
    Group,
    Proposer,
    list_smallest,
    propose_refined,
)
from shardfold.planner.select import Ranking, Selection, hint_for
from shardfold.planner.step_bound import Proof
from shardfold.progress import Stage, Watch

SHARES = (0.7, 0.9, 1.0, 1.0)  # of the smallest peak so far: limits that are tried before a refusal


def select_plan(
    captures: Captures, micro_batches: MicroBatches, request: ResolvedRequest, watch: Watch
) -> Selection:
    """The fastest step that fits, over the numbers of micro-batches that are wished for."""

    def select(count: int, is_last: bool) -> Selection:
        graph = captures.graph(count)
        if request.pricing.profile is not None:
            check_profile(request.pricing.profile, request.cluster, graph)
        stage = "search" if count == 1 else f"searching with {count} micro-batches"
        asked = replace(request, micro_batches=count)
        shares = SHARES if is_last else ()
        return select_for(
            graph, asked, lambda done, total: watch(Stage(stage, done, total)), shares
        )

    return choose_micro_batches(micro_batches, select, lambda: captures.samples)


def select_for(
    graph: Graph, request: ResolvedRequest, watch: MeshWatch, shares: Sequence[float] = SHARES
) -> Selection:
    """The fastest step that fits, for one graph; pins are held against the one without them."""
    cases = Cases(graph, request)
    selection = _select(cases, request, watch, shares)
    for candidate in selection.simulated:
        candidate.case.forget()
    if not request.pins:
        return selection
    unpinned = _select(cases, replace(request, pins=()), watch, shares)
    return replace(selection, pins=tuple(request.pins), unpinned=unpinned)


def _select(
    cases: Cases, request: ResolvedRequest, watch: MeshWatch, shares: Sequence[float]
) -> Selection:
    """Searched, proposed, simulated, selected."""
    if not request.pricing.overlaps:
        return search_meshes(cases, request, watch)
    proof = Proof()
    searched, groups, ranking = _search_and_simulate(cases, request, watch, proof)
    smallest = ranking.least_bytes
    if not proof.is_met_by(ranking):
        _simulate_proposals((proof.propose,), groups, ranking)
        if not request.pins:
            if request.recompute == "auto":
                _simulate_proposals((propose_recomputed,), groups, ranking)
            _simulate_proposals((propose_refined,), groups, ranking)
    if not ranking.has_fitting and request.limit_bytes is not None:
        found = _find_smallest(cases, request, watch, shares)
        if found.peak_bytes > request.limit:
            needed, limit = found.peak_bytes, request.limit
            hint = hint_for(found, limit)
            raise InfeasibleError(needed_bytes=needed, limit_bytes=limit, hint=hint)
        ranking.candidates.append(found)
    return replace(
        searched,
        winner=ranking.preferred,
        simulated=tuple(ranking.candidates),
        smallest_bytes=None if ranking.has_fitting else smallest,
        step_bound=proof.seconds,
    )


def _search_and_simulate(
    cases: Cases, request: ResolvedRequest, watch: MeshWatch, proof: Proof | None = None
) -> tuple[Selection, list[Group], Ranking]:
    """What the search finds, and the ranking of all that is proposed from it and from its proof.

    What meets its bound already, as where the host decides, is not improved on. Where nothing
    fits with all activations kept, blocks are recomputed, too.
    """
    searched = _search(cases, request, watch)
    groups: list[Group] = [_drop_repeated(searched.searched)]
    ranking = _simulate_proposals(FIRST, groups, Ranking(request.limit, prefer=request.prefer))
    if proof is not None and ranking.has_fitting:
        _simulate_proposals((proof.propose,), groups, ranking)
        if proof.is_met_by(ranking):
            return searched, groups, ranking
    _simulate_proposals(FURTHER, groups, ranking)
    may_recompute = request.recompute == "auto" and not request.pins
    if not ranking.has_fitting and may_recompute and not any(c.case.recomputed for c in groups[0]):
        again = replace(request, limit_bytes=None, recompute="always")
        groups.append(search_meshes(cases, again, watch).searched)
        ranking = _simulate_proposals(
            PROPOSERS, groups, Ranking(request.limit, prefer=request.prefer)
        )
    return searched, groups, ranking


def _simulate_proposals(
    proposers: Sequence[Proposer], groups: Sequence[Group], ranking: Ranking
) -> Ranking:
    """Simulate all candidates of the proposers, each ranked before the next is proposed."""
    for propose in proposers:
        for candidate in propose(groups, ranking):
            ranking.candidates.append(simulate(candidate))
    return ranking


def _search(cases: Cases, request: ResolvedRequest, watch: MeshWatch) -> Selection:
    """What the search finds; where its sum of bytes exceeds a given limit, whatever there is."""
    try:
        return search_meshes(cases, request, watch)
    except InfeasibleError:
        if request.limit_bytes is None:
            raise
    found = _search_unlimited(cases, request, watch)
    searched = tuple(candidate for each in found for candidate in each.searched)
    return replace(found[0], searched=searched, limit_bytes=request.limit_bytes)


def _search_unlimited(cases: Cases, request: ResolvedRequest, watch: MeshWatch) -> list[Selection]:
    """What the search finds without a limit, with everything kept and with all recomputed."""
    both: tuple[Recompute, ...] = ("never", "always")
    ways = both if request.recompute == "auto" and not request.pins else (request.recompute,)
    return [
        search_meshes(cases, replace(request, limit_bytes=None, recompute=way), watch)
        for way in ways
    ]


def _drop_repeated(searched: Sequence[Candidate]) -> Group:
    """One candidate for each mesh and for whether it recomputes."""
    return tuple({(str(c.case.mesh), bool(c.case.recomputed)): c for c in searched}.values())


def _find_smallest(
    cases: Cases, request: ResolvedRequest, watch: MeshWatch, shares: Sequence[float]
) -> Candidate:
    """The candidate with the smallest peak: from the fewest bytes on, at ever lower limits.

    It does not depend on the limit that was asked for, so what is said to be needed is met.
    """
    groups = [each.searched for each in _search_unlimited(cases, request, watch)]
    best = min(map(simulate, list_smallest(groups)), key=lambda c: c.peak_bytes)
    for share in shares:
        fixed = best.case.fixed_bytes
        lower = min(fixed + share * (best.peak_bytes - fixed), best.peak_bytes - 1)
        asked = replace(request, limit_bytes=lower)
        _, _, ranking = _search_and_simulate(cases, asked, watch)
        best = min((best, *ranking.candidates), key=lambda c: c.peak_bytes)
    return best
