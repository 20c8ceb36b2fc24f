"""Recompute as little as the memory limit asks for: which operators, in how many blocks.

A choice that keeps all activations is faster than with anything recomputed, but may not fit. For
its splits, the operators of a block have levels (`recompute_levels.py`): sets that run again, each
the least seconds for its bytes. A step from one level to the next frees so many bytes in each block
for so many seconds. The cheapest steps are taken first, over all kinds of blocks, until the step
fits: that is the least time for those bytes, but for a part of one block. The last of the steps is
taken by the first blocks only; the others keep more, as theirs is what backward needs first.

    a faster choice that does not fit, and what is to be freed for it
        -> levels -> what runs again -> simulated; freed a little more or less, until it just fits
        -> splits searched anew for that, within the limit -> simulated; and once more from there

The border between blocks that recompute more and less divides a run in two, each a run of its own.
A graph holds three periods of a long run: the first, the one that stands for all that are left out
(the model period), and the last. The first `first` periods and the rest become two runs; the last
period before the border stands alone, as it is read by another kind of period than the others. For
that the graph gets the four periods around the border, as copies of the model period under their
own names.

    before: 0 1 ... 9            ten periods, three in the graph
    after:  0 1 ... 4  5  6 7 ... 9   five, one and four; seven in the graph
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from shardfold.costs.activations import KEEP_ALL, POLICIES, Blocks, Regions
from shardfold.graph import Graph
from shardfold.graph.graph import Op, Operand, Tensor
from shardfold.graph.repeats import MODEL, Repeat, operator_order, places
from shardfold.planner.case import Candidate, Case, Source, make_case, simulate
from shardfold.planner.proposals import WEIGHTS, Group, solve_discounted
from shardfold.planner.recompute_levels import Level, levels_of
from shardfold.planner.select import Ranking
from shardfold.search import unproven
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


BASES = 2  # choices for which something is recomputed
ROUNDS = 3  # of more or less that is freed
CAREFUL = 0.97  # of the memory that is left: blocks are not all alike in what else they hold
Kind = tuple[object, ...]


@dataclass(frozen=True)
class Freed:
    """What runs again: a level for each kind of block, and for the first of one kind the next."""

    levels: dict[Kind, Level]
    kind: Kind | None = None
    more: Level | None = None
    count: int = 0  # blocks of that kind that take it
    byte_price: float = 0.0  # seconds for a byte, of the last step that is taken


class Ladder:
    """The levels of all kinds of blocks under one choice that keeps everything."""

    def __init__(self, base: Candidate) -> None:
        case = base.case
        self.blocks = Blocks(case.graph, case.subdims)
        decoded = case.decode(base.choice).decoded
        facts = case.scheduler.facts
        alike: dict[Kind, list[range]] = defaultdict(list)
        for op, _, _ in operator_order(case.graph):
            if (block := self.blocks.starts.get(op)) is not None:
                alike[kind_of(case.graph, block)].append(block)
        self.counts = {kind: len(each) for kind, each in alike.items()}
        self.levels = {  # of one in the middle: the first and the last have other neighbours
            kind: levels_of(decoded, facts, self.blocks, each[len(each) // 2])
            for kind, each in alike.items()
        }
        self.steps = sorted(self._steps(), key=lambda step: step[0])

    def _steps(self) -> Iterator[tuple[float, Kind, int]]:
        """Every step from a level to the next, with its price: seconds for a byte."""
        for kind, levels in self.levels.items():
            for at, (low, high) in enumerate(pairwise(levels), 1):
                yield (high.seconds - low.seconds) / (low.bytes - high.bytes), kind, at

    @property
    def most_bytes(self) -> float:
        """What can be freed at all."""
        ends = ((levels[0], levels[-1], kind) for kind, levels in self.levels.items())
        return sum((first.bytes - last.bytes) * self.counts[k] for first, last, k in ends)

    def free(self, wanted: float) -> tuple[Freed, float]:
        """What runs again to free so many bytes, and the seconds that it adds."""
        chosen, seconds = {kind: levels[0] for kind, levels in self.levels.items()}, 0.0
        paid = 0.0
        for price, kind, at in self.steps:
            low, high = self.levels[kind][at - 1], self.levels[kind][at]
            each, count = low.bytes - high.bytes, self.counts[kind]
            taken = min(count, math.ceil(wanted / each))
            if taken <= 0:
                break
            seconds += taken * (high.seconds - low.seconds)
            wanted -= taken * each
            paid = price
            if taken < count:
                return Freed(chosen, kind, high, taken, paid), seconds
            chosen[kind] = high
        return Freed(chosen, byte_price=paid), seconds


def kind_of(graph: Graph, block: range) -> Kind:
    """What blocks that are alike have in common: their operators, and the sizes of results."""
    ops = [graph.ops[i] for i in block]
    return tuple((op.kind, *(graph.tensors[t].type for t in op.results)) for op in ops)


def propose_recomputed(groups: Sequence[Group], ranking: Ranking) -> Iterator[Candidate]:
    """From the fastest choices that keep too much: the same, with what must be recomputed."""
    limit = ranking.limit_bytes
    for base, ladder in _bases(groups, ranking):
        found = yield from _fitted(base, ladder, ranking)
        if found is None or found.seconds > ranking.best_seconds:
            continue
        # The search bounds a sum of bytes, the limit is on the peak: as far apart as they are here.
        room = limit - (found.peak_bytes - found.summed_bytes)
        before = ranking.winner
        for weight in WEIGHTS:
            for other in solve_discounted(found, weight, room):
                yield replace(other, source=Source.RECOMPUTE, label=LABEL)
        if ranking.winner is not before:  # other splits, with levels of their own
            again = _keep_all(ranking.winner, groups)
            yield from _fitted(again, Ladder(again), ranking)
    if ranking.winner.case.recomputed:
        yield from _by_policy(_keep_all(ranking.winner, groups), ranking)


LABEL = "search, some operators recomputed"


def _by_policy(base: Candidate, ranking: Ranking) -> Iterator[Candidate]:
    """A choice with what is recomputed as people know it: that may overlap better."""
    case = base.case
    for policy in POLICIES.values():
        regions = policy(case.graph, case.subdims)
        if regions and base.seconds < ranking.best_seconds:
            other = make_case(case.request, case.scheduler, case.prices, regions, case.patience)
            yield _carried(base, other, Source.RECOMPUTE)


def _bases(groups: Sequence[Group], ranking: Ranking) -> list[tuple[Candidate, Ladder]]:
    """The choices that keep everything and promise the shortest steps that fit."""
    best, limit = ranking.best_seconds, ranking.limit_bytes
    recomputing = [c for c in ranking.fitting(ranking.candidates) if c.case.recomputed]
    whole = min(recomputing, key=lambda c: c.seconds, default=None)
    keeping = [c for c in ranking.candidates if not c.case.recomputed and c.peak_bytes > limit]
    twins = [] if whole is None else [_keep_all(whole, groups)]
    found: dict[object, tuple[float, Candidate, Ladder]] = {}
    for candidate in (*twins, *sorted(keeping, key=lambda c: c.seconds)):
        key = (str(candidate.case.mesh), tuple(candidate.choice))
        if candidate.seconds >= best or candidate.peak_bytes <= limit or key in found:
            continue
        if sum(total <= candidate.seconds for total, _, _ in found.values()) >= BASES:
            break  # recomputing only adds to this one, and to all that follow
        ladder = Ladder(candidate)
        wanted = candidate.peak_bytes - limit
        if wanted <= ladder.most_bytes:
            seconds = candidate.seconds + ladder.free(wanted)[1]
            found[key] = (seconds, candidate, ladder)
    hopeful = sorted((f for f in found.values() if f[0] < best), key=lambda f: f[0])
    return [(candidate, ladder) for _, candidate, ladder in hopeful[:BASES]]


def _fitted(
    base: Candidate, ladder: Ladder, ranking: Ranking
) -> Generator[Candidate, None, Candidate | None]:
    """A choice with as much recomputed as makes it fit; the last that did, if any."""
    limit, wanted = ranking.limit_bytes, base.peak_bytes - ranking.limit_bytes
    fitting: Candidate | None = None
    for _ in range(ROUNDS):
        if wanted > ladder.most_bytes or wanted <= 0:
            break
        found = simulate(_recomputing(base, ladder.free(wanted)[0], ladder.blocks))
        yield found
        over = found.peak_bytes - limit
        if over <= 0:
            fitting = found if fitting is None or found.seconds < fitting.seconds else fitting
        if 0 >= over >= -(1 - CAREFUL) * limit:
            break
        wanted += over / CAREFUL if over > 0 else CAREFUL * over
    return fitting


def _keep_all(whole: Candidate, groups: Sequence[Group]) -> Candidate:
    """The same choice with all activations kept, simulated."""
    case = whole.case
    for searched in (c.case for group in groups for c in group):
        if searched.mesh == case.mesh and not searched.recomputed:
            keeping = searched
            break
    else:
        plain = Scheduler(case.graph, case.subdims, case.request.cluster)
        keeping = make_case(case.request, plain, case.prices, KEEP_ALL, case.patience)
    return simulate(_carried(whole, keeping, Source.SEARCH))


def _recomputing(base: Candidate, freed: Freed, blocks: Blocks) -> Candidate:
    """A choice that keeps everything, with something recomputed."""
    old = base.case
    scheduler, border = old.scheduler, 0
    if freed.kind is not None:
        graph, border = divide_at(old.graph, blocks, freed.kind, freed.count)
        if graph is not old.graph:
            scheduler = Scheduler(graph, old.request.subdims_of(graph), old.request.cluster)
    if scheduler is not old.scheduler:
        blocks = Blocks(scheduler.graph, scheduler.subdims)
    regions = level_regions(freed, blocks, border)
    case = make_case(old.request, scheduler, old.prices, regions, old.patience)
    return replace(_carried(base, case, Source.RECOMPUTE), byte_price=freed.byte_price)


def level_regions(freed: Freed, blocks: Blocks, border: int) -> Regions:
    """What runs again in every block, by its kind and by the side of the border that it is on."""
    graph = blocks.graph
    last = {op: place for place, (op, _, _) in enumerate(operator_order(graph))}
    again: list[int] = []
    for block in blocks.ranges:
        kind = kind_of(graph, block)
        level = freed.levels.get(kind)
        if kind == freed.kind and last[block.start] < border:
            level = freed.more
        again += () if level is None else (block.start + offset for offset in level.again)
    return blocks.regions(again)


def _carried(candidate: Candidate, case: Case, source: Source) -> Candidate:
    """The same choice for another graph of the same model."""
    old = dict(zip(_keys(candidate.case), candidate.choice, strict=True))
    choice = np.array([old[key] for key in _keys(case)])
    found = unproven(case.unrolled.problem, choice, source.value, candidate.solution.lower_bound)
    label = LABEL if source is Source.RECOMPUTE else candidate.label
    return Candidate(case, found, source, label)


def _keys(case: Case) -> list[tuple[object, ...]]:
    """Every decision of the whole model by its place there, in the order of the problem."""
    graph, place = case.graph, places(case.graph)
    writers, readers = graph.writers(), graph.readers()
    own: list[tuple[str, int, int]] = []
    for vertex in case.tables.vertices:
        at = {"op": (vertex.index, 0)}.get(vertex.what)
        if at is None:
            at = writers[vertex.index] if vertex.what == "tensor" else readers[vertex.index][0]
        own.append((vertex.what, place[at[0]], at[1]))
    found: dict[int, tuple[object, ...]] = dict(enumerate(own))
    for run in case.unrolled.runs:
        for number, copies in enumerate(run.copies.tolist(), 1):
            for vertex, model in zip(copies, run.traced[MODEL].tolist(), strict=True):
                what, at, operand = own[model]
                found[vertex] = (what, at + number * run.repeat.length, operand)
    return [found[vertex] for vertex in range(len(found))]


def divide_at(graph: Graph, blocks: Blocks, kind: Kind, count: int) -> tuple[Graph, int]:
    """The graph with a border before block `count` of a kind, and its place in the whole model."""
    starts = {op for op, block in blocks.starts.items() if kind_of(graph, block) == kind}
    order = operator_order(graph)
    border = [at for at, (op, _, _) in enumerate(order) if op in starts][count]
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
