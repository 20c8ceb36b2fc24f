"""Recompute as few blocks as the memory limit asks for.

Where a candidate that fits recomputes all blocks, memory is often left. So much of it as a block
would keep is one block that need not be recomputed: the first `count` blocks still are, the others
keep their activations, as those are what backward needs first. The splits are chosen anew at that
count, for both parts of the run that the border divides, so a block that is recomputed need not be
split as one that is not. So many blocks that their work alone makes the step longer than the best
one are not tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardfold.costs import Tables
from shardfold.costs.activations import KEEP_ALL, Regions, block_regions, in_model
from shardfold.graph import Graph
from shardfold.graph.divide_run import divided
from shardfold.graph.repeats import MODEL, Repeat, operator_order
from shardfold.planner.case import Candidate, Case, Source, make_case
from shardfold.planner.proposals import WEIGHTS, Group, solve_discounted
from shardfold.planner.select import Ranking, least_seconds
from shardfold.sharding import Subdims
from shardfold.simulate.tasks import Scheduler

ROUNDS = 3
CAREFUL = 0.97  # of the memory that is left: blocks are not all alike in what else they hold


def propose_fewer_recomputed(groups: Sequence[Group], ranking: Ranking) -> Iterator[Candidate]:
    """From the fastest that fits and recomputes blocks: the same with fewer blocks recomputed."""
    limit = ranking.limit_bytes
    recomputing = [c for c in ranking.fitting(ranking.candidates) if c.case.recomputed]
    if not recomputing:
        return
    whole = min(recomputing, key=lambda c: c.seconds)
    keeping = _keep_all(whole, groups)
    blocks, peak = len(_recomputed_blocks(whole.case)), whole.peak_bytes
    count = blocks - int(CAREFUL * (limit - peak) / (_kept_bytes(whole, keeping) / blocks))
    for _ in range(ROUNDS):
        if not 0 < count < blocks or _is_hopeless(ranking, whole.case, keeping, count):
            return
        before = ranking.winner
        yield from _recompute_first(whole, count, limit)
        if ranking.winner is before:
            count = (count + blocks) // 2
            continue
        most = ranking.winner.peak_bytes
        fewer = int(CAREFUL * (limit - most) * (blocks - count) / max(most - peak, 1.0))
        if fewer * 16 < blocks:
            return
        count -= fewer


def _recomputed_blocks(case: Case) -> tuple[range, ...]:
    return in_model(case.recomputed, case.graph).ranges


def _keep_all(whole: Candidate, groups: Sequence[Group]) -> Case:
    """The same mesh with all activations kept."""
    case = whole.case
    for searched in (c.case for group in groups for c in group):
        if searched.mesh == case.mesh and not searched.recomputed:
            return searched
    return make_case(case.request, case.scheduler, case.prices, KEEP_ALL)


def _kept_bytes(whole: Candidate, keeping: Case) -> float:
    """What the choice would hold more if nothing were recomputed."""
    kept = keeping.unrolled.problem.total_bytes(whole.choice)
    return max(kept - whole.case.unrolled.problem.total_bytes(whole.choice), 1.0)


def _is_hopeless(ranking: Ranking, whole: Case, keeping: Case, count: int) -> bool:
    """Whether the work of recomputing so many blocks alone takes too long; more take longer."""
    if not ranking.has_fitting:
        return False
    border = _recomputed_blocks(whole)[count].start
    more = more_seconds(whole.graph, keeping.tables, whole.tables, border)
    return least_seconds(keeping.unrolled.problem) + more >= ranking.winner.seconds


def more_seconds(graph: Graph, keeping: Tables, whole: Tables, border: int) -> float:
    """What is added at least by recomputing all that comes before an operator of the model.

    The tables `keeping` recompute nothing, and `whole` all that can be. An operator that runs
    again costs at least as much more as its cheapest choice does.
    """
    more = dict(_least(whole))
    for op, seconds in _least(keeping):
        more[op] -= seconds
    before = (op for op, _, _ in operator_order(graph)[:border])
    return sum(more[op] for op in before)


def _least(tables: Tables) -> list[tuple[int, float]]:
    """Every operator with the seconds of its cheapest choice."""
    pairs = zip(tables.vertices, tables.problem.costs, strict=True)
    return [(vertex.index, float(cost.min())) for vertex, cost in pairs if vertex.what == "op"]


def _recompute_first(whole: Candidate, count: int, limit: float) -> Iterator[Candidate]:
    """The search's choices with only the first `count` blocks recomputed."""
    old = whole.case
    graph, border = divide_at(old.graph, old.subdims, count)
    scheduler = Scheduler(graph, old.request.subdims_of(graph), old.request.cluster)
    regions = leading_regions(graph, scheduler.subdims, border)
    case = make_case(old.request, scheduler, old.prices, regions)
    # The search bounds a sum of bytes, the limit is on the peak: as far apart as they were before.
    room = limit - (whole.peak_bytes - (whole.solution.bytes or 0.0))
    for weight in WEIGHTS:
        for found in solve_discounted(Candidate(case, whole.solution), weight, room):
            yield replace(found, source=Source.RECOMPUTE, label="search, fewer blocks recomputed")


def divide_at(graph: Graph, subdims: Subdims, count: int) -> tuple[Graph, int]:
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


def leading_regions(graph: Graph, subdims: Subdims, border: int) -> Regions:
    """The regions that only stand for blocks before the border."""
    regions = block_regions(graph, subdims)
    last = {op: place for place, (op, _, _) in enumerate(operator_order(graph))}
    return replace(regions, ranges=tuple(r for r in regions.ranges if last[r.start] < border))
