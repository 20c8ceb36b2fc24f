"""Recompute as few blocks as the memory limit asks for.

Where a finalist recomputes all blocks, memory is often left. So much of it as a block would keep is
one block that need not be recomputed: the first `count` blocks still are, the others keep their
activations, as those are what backward needs first. The splits are chosen anew at that count, for
both parts of the run that the border divides, so a block that is recomputed need not be split as
one that is not. The simulator judges; whatever does not fit or is not faster changes nothing.
So many blocks that their work alone makes the step longer than the best one are not tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardfold.costs import tabulate
from shardfold.costs.recompute import Regions, block_regions, in_model
from shardfold.costs.unroll import unfold
from shardfold.graph import Graph
from shardfold.graph.divide_run import divided
from shardfold.graph.repeats import MODEL, Repeat, operator_order
from shardfold.planner.lower_bounds import least_seconds, more_seconds
from shardfold.planner.mesh_search import Candidate
from shardfold.planner.proposals import WEIGHTS, Field, Finalist, weighted
from shardfold.planner.request import Request
from shardfold.planner.select import Judge, Judged, Verdict
from shardfold.search.subproblem import Restricted
from shardfold.sharding import Subdims

ROUNDS = 3
CAREFUL = 0.97  # of the memory that is left: blocks are not all alike in what else they hold


def spare(verdict: Verdict, request: Request, judge: Judge) -> Verdict:
    """The verdict with fewer blocks recomputed, where that fits and is faster."""
    limit = verdict.chosen.limit_bytes
    fitting = [j for j in verdict.finalists if j.simulation.peak_bytes <= limit]
    whole = min((j for j in fitting if _recomputed(j)), key=lambda j: j.rank, default=None)
    if whole is None:
        return verdict
    keeping = _keeping(verdict, whole, request)
    blocks, peak = len(_recomputed(whole)), whole.simulation.peak_bytes
    count = blocks - int(CAREFUL * (limit - peak) / (_kept_bytes(whole, keeping) / blocks))
    for _ in range(ROUNDS):
        if not 0 < count < blocks or _is_hopeless(verdict, whole, keeping, count):
            break
        found = judge.judged(_proposed(whole, request, count, limit))
        better = judge.among(verdict, found)
        if better.winner is verdict.winner:
            count = (count + blocks) // 2
            continue
        verdict, most = better, better.winner.simulation.peak_bytes
        fewer = int(CAREFUL * (limit - most) * (blocks - count) / max(most - peak, 1.0))
        if fewer * 16 < blocks:
            break
        count -= fewer
    return verdict


def _recomputed(judged: Judged) -> tuple[range, ...]:
    finalist = judged.finalist
    return in_model(finalist.candidate.tabulated.regions, finalist.field.graph).ranges


def _keeping(verdict: Verdict, whole: Judged, request: Request) -> Candidate:
    """The same mesh with all activations kept."""
    at, old = whole.finalist.field, whole.finalist.candidate
    for tried in verdict.chosen.tried:
        if tried.mesh == old.mesh and not tried.tabulated.regions:
            return tried
    passes = request.passes
    tables = tabulate(at.graph, at.subdims, old.mesh, old.model, request.optimizer, passes=passes)
    return replace(old, tabulated=tables, unfolded=unfold(tables, at.graph))


def _kept_bytes(whole: Judged, keeping: Candidate) -> float:
    """What the choice would hold more if nothing were recomputed."""
    candidate = whole.finalist.candidate
    choice = candidate.solution.choice
    kept = keeping.unfolded.problem.total_bytes(choice)
    return max(kept - candidate.unfolded.problem.total_bytes(choice), 1.0)


def _is_hopeless(verdict: Verdict, whole: Judged, keeping: Candidate, count: int) -> bool:
    """Whether the work of recomputing so many blocks alone takes too long; more take longer."""
    if verdict.winner.simulation.peak_bytes > verdict.chosen.limit_bytes:
        return False
    at, border = whole.finalist.field, _recomputed(whole)[count].start
    tables = whole.finalist.candidate.tabulated
    more = more_seconds(at.graph, keeping.tabulated, tables, border)
    return least_seconds(keeping.unfolded.problem) + more >= verdict.winner.rank


def _proposed(whole: Judged, request: Request, count: int, limit: float) -> Iterator[Finalist]:
    """The search's choices with only the first `count` blocks recomputed."""
    at, old = whole.finalist.field, whole.finalist.candidate
    graph, border = _parted(at.graph, at.subdims, count)
    subdims = request.subdims_of(graph)
    regions = _leading(graph, subdims, border)
    given = (old.mesh, old.model, request.optimizer, regions)
    tables = tabulate(graph, subdims, *given, passes=request.passes)
    unfolded = unfold(tables, graph)
    every = Restricted(unfolded.problem, {})
    new = replace(old, tabulated=tables, left=every, unfolded=unfolded, known=[])
    field = Field(graph, subdims, (new,))
    # The search bounds a sum of bytes, the limit is on the peak: as far apart as they were before.
    room = limit - (whole.simulation.peak_bytes - (old.solution.bytes or 0.0))
    for weight in WEIGHTS:
        found = weighted(field, new, weight, room)
        if found is not None:
            yield found


def _parted(graph: Graph, subdims: Subdims, count: int) -> tuple[Graph, int]:
    """The graph with a border before block `count`, and the border's place in the whole model."""
    border = in_model(block_regions(graph, subdims), graph).ranges[count].start
    order = operator_order(graph)
    op, number, copy = order[border]
    if number >= 0 and graph.repeats[number].missing:
        period = _period(graph.repeats[number], op, copy)
        if period:
            return divided(graph, number, period), border
    _, number, _ = order[border - 1]
    if number >= 0 and graph.repeats[number].missing:
        # The run ends at the border: its last period is read by what is not recomputed.
        return divided(graph, number, graph.repeats[number].count - 1), border
    return graph, border


def _period(repeat: Repeat, op: int, copy: int | None) -> int:
    """The number of an operator's period in the whole model."""
    period = repeat.period_of(op)
    assert period is not None
    if copy is not None:
        return MODEL + 1 + copy
    return period if period <= MODEL else period + repeat.missing


def _leading(graph: Graph, subdims: Subdims, border: int) -> Regions:
    """The regions that only stand for blocks before the border."""
    regions = block_regions(graph, subdims)
    last = {op: place for place, (op, _, _) in enumerate(operator_order(graph))}
    return replace(regions, ranges=tuple(r for r in regions.ranges if last[r.start] < border))
