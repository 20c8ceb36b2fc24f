"""Recompute as few blocks as the memory limit asks for.

Where a candidate that fits recomputes all blocks, memory is often left. So much of it as a block
would keep is one block that need not be recomputed: the first `count` blocks still are, the others
keep their activations, as those are what backward needs first. The splits are chosen anew at that
count, for both parts of the run that the border divides, so a block that is recomputed need not be
split as one that is not. So many blocks that their work alone makes the step longer than the best
one are not tried.

The border divides a run in two, each a run of its own. A graph holds three periods of a long run:
the first, the one that stands for all that are left out (the model period), and the last. The first
`first` periods and the rest become two runs; the last period before the border stands alone, as it
is read by another kind of period than the others. For that the graph gets the four periods around
the border, as copies of the model period under their own names.

    before: 0 1 ... 9            ten periods, three in the graph
    after:  0 1 ... 4  5  6 7 ... 9   five, one and four; seven in the graph
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardfold.costs import Tables
from shardfold.costs.activations import KEEP_ALL, Blocks, Regions
from shardfold.graph import Graph
from shardfold.graph.graph import Op, Operand, Tensor
from shardfold.graph.repeats import MODEL, Repeat, operator_order
from shardfold.planner.case import Candidate, Case, Source, make_case
from shardfold.planner.proposals import WEIGHTS, Group, solve_discounted
from shardfold.planner.select import Ranking, least_seconds
from shardfold.sharding import Subdims
from shardfold.simulate.tasks import Scheduler


def divided(graph: Graph, number: int, first: int) -> Graph:
    """The same model with its run `number` as two: of the periods before `first`, and after.

    A part of a few periods is no run: all of them are in the graph.
    """
    repeat = graph.repeats[number]
    if not 0 < first < repeat.count:
        raise ValueError(f"A run of {repeat.count} periods cannot be divided after {first}.")
    before = _part(range(first - 1), tail=1)
    after = _part(range(first, repeat.count), tail=repeat.traced - MODEL - 1)
    wanted = [*before, first - 1, *after]
    old = [*range(MODEL + 1), *range(repeat.count - (repeat.traced - MODEL - 1), repeat.count)]
    copier = _Copier(graph, repeat)
    middle = [op for p in wanted if p not in old for op in copier.copy(p)]
    border = repeat.start + (MODEL + 1) * repeat.length
    rest = [copier.rewired(op) for op in graph.ops[border:]]
    starts = (repeat.start, repeat.start + (len(before) + 1) * repeat.length)
    parts = (
        replace(
            repeat, start=start, traced=len(traced), count=len(all_), paths=_paths(repeat, all_)
        )
        for start, traced, all_ in zip(
            starts, (before, after), (range(first - 1), range(first, repeat.count)), strict=True
        )
        if len(traced) < len(all_)
    )
    later = (replace(each, start=each.start + len(middle)) for each in graph.repeats[number + 1 :])
    return replace(
        graph,
        tensors=tuple(copier.tensors),
        ops=(*graph.ops[:border], *middle, *rest),
        repeats=(*graph.repeats[:number], *parts, *later),
    )


def _part(periods: range, tail: int) -> list[int]:
    """The periods of a part that are in the graph: two at its head, and its tail."""
    if len(periods) <= MODEL + 1 + tail:
        return list(periods)
    return [*periods[: MODEL + 1], *periods[len(periods) - tail :]]


def _paths(repeat: Repeat, periods: range) -> tuple[tuple[str, ...], ...]:
    return repeat.paths[periods.start : periods.stop]


class _Copier:
    """Copies the model period, one after the other, each reading what the one before wrote."""

    def __init__(self, graph: Graph, repeat: Repeat) -> None:
        self.repeat, self.tensors = repeat, list(graph.tensors)
        self.model = [graph.ops[i] for i in repeat.ops(MODEL)]
        before = [graph.ops[i] for i in repeat.ops(MODEL - 1)]
        pairs = zip(before, self.model, strict=True)
        self.following = {
            old: new
            for ours, theirs in pairs
            for old, new in zip(ours.results, theirs.results, strict=True)
        }
        self.written = {t for op in self.model for t in op.results}
        self.last = {t: t for t in self.written}  # the model period's tensors in the newest copy

    def copy(self, period: int) -> list[Op]:
        """The operators of a period that the graph left out."""
        own: dict[int, int] = {}
        for tensor in (t for op in self.model for t in (*op.inputs, *op.results)):
            if tensor not in own:
                own[tensor] = self._tensor(tensor, period)
        ops = [self._op(op, own, period) for op in self.model]
        self.last = {t: own[t] for t in self.written}
        return ops

    def rewired(self, op: Op) -> Op:
        """An operator after the copies, which reads the newest of them."""
        operands = tuple(replace(o, tensor=self.last.get(o.tensor, o.tensor)) for o in op.operands)
        return op if operands == op.operands else replace(op, operands=operands)

    def _tensor(self, tensor: int, period: int) -> int:
        """The period's own tensor; the one before's for what that wrote; else the shared one."""
        if tensor in self.following:
            return self.last[self.following[tensor]]
        old: Tensor = self.tensors[tensor]
        names = tuple(self._renamed(name, period) for name in old.names)
        if tensor not in self.written and (old.role == "activation" or names == old.names):
            return tensor
        self.tensors.append(replace(old, names=names))
        return len(self.tensors) - 1

    def _op(self, op: Op, own: dict[int, int], period: int) -> Op:
        origin = replace(op.origin, module=self._renamed(op.origin.module, period))
        return Op(
            self._renamed(op.name, period),
            op.kind,
            tuple(Operand(o.name, own[o.tensor]) for o in op.operands),
            tuple(own[t] for t in op.results),
            op.attributes,
            origin,
            op.splits,
        )

    def _renamed(self, name: str, period: int) -> str:
        return self.repeat.renamed(name, period - MODEL - 1)


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


def _recomputed_blocks(case: Case) -> list[range]:
    return block_places(case.graph, Blocks(case.graph, case.subdims))


def block_places(graph: Graph, blocks: Blocks) -> list[range]:
    """Every block of the whole model, by the places of its operators there."""
    lengths = {block.start: len(block) for block in blocks.ranges}
    order = [op for op, _, _ in operator_order(graph)]
    return [range(at, at + lengths[op]) for at, op in enumerate(order) if op in lengths]


def _keep_all(whole: Candidate, groups: Sequence[Group]) -> Case:
    """The same mesh with all activations kept."""
    case = whole.case
    for searched in (c.case for group in groups for c in group):
        if searched.mesh == case.mesh and not searched.recomputed:
            return searched
    return make_case(case.request, case.scheduler, case.prices, KEEP_ALL, case.patience)


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
    case = make_case(old.request, scheduler, old.prices, regions, old.patience)
    # The search bounds a sum of bytes, the limit is on the peak: as far apart as they were before.
    room = limit - (whole.peak_bytes - whole.summed_bytes)
    for weight in WEIGHTS:
        for found in solve_discounted(Candidate(case, whole.solution), weight, room):
            yield replace(found, source=Source.RECOMPUTE, label="search, fewer blocks recomputed")


def divide_at(graph: Graph, subdims: Subdims, count: int) -> tuple[Graph, int]:
    """The graph with a border before block `count`, and the border's place in the whole model."""
    border = block_places(graph, Blocks(graph, subdims))[count].start
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
    """Everything of the blocks that are before the border, all of those that they stand for."""
    blocks = Blocks(graph, subdims)
    last = {op: place for place, (op, _, _) in enumerate(operator_order(graph))}
    return blocks.regions([i for r in blocks.ranges if last[r.start] < border for i in r])
