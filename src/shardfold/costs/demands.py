"""What every choice asks of each stream in each phase of a step: the tables of costs, in parts.

A step is simulated on a stream of local work and one for each level of links. What a phase asks of
them is a sum over decisions and edges, as costs are:

    work               seconds of local work and of the collectives that work waits for
    ahead, behind      of each level: gathers of parameters, reductions of their gradients
    wait               of each level: the collectives that work waits for

and over the whole step the optimizer's update, and the host that asks for work. A collective asks
all levels that it crosses. `last` is the backward phase of the last micro-batch, `backward` that of
all others.

No phase is shorter than any of these sums, nor than some sums of one kind for the operators before
a place and of another kind for those after it: `Bounds` has them. The places are the first and
the last operator that reads parameters, because nothing hides what is gathered before the
first or reduced after it. `docs/explanation/proof.md` derives them from the simulator's rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardfold.costs.activations import Regions
from shardfold.costs.decision_graph import Edge, Leg, Vertex
from shardfold.costs.model import CostModel, is_beside, split_seconds
from shardfold.costs.optimizers import Optimizer
from shardfold.costs.parameters import sum_up_steps, update_steps
from shardfold.costs.reshard import reshard_all
from shardfold.costs.steps import Collective, Compute, Step, Steps, Values, defer, times
from shardfold.costs.tables import Tables
from shardfold.costs.unroll import Ints, UnrolledProblem
from shardfold.graph import Graph
from shardfold.graph.repeats import MODEL
from shardfold.search import Problem
from shardfold.sharding import Subdims
from shardfold.sharding.layouts import distinct

Phase = Literal["forward", "backward", "last"]
Mode = Literal["ahead", "behind", "wait"]
MODES: tuple[Mode, ...] = ("ahead", "behind", "wait")
Parts = dict[int, Values]  # by the number of what is asked: seconds of each choice
Split = Callable[[Compute], tuple[Values, Values]]  # seconds of the device, and of the host
ROUNDING = 1e-7  # of a step: equal blocks are counted to within less


@dataclass(frozen=True, slots=True)
class Asked:
    """Numbers of what is asked: for each phase work and modes by level, then update and host."""

    levels: int
    micro_batches: int

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases in which streams run beside each other."""
        return ("forward", "last") if self.micro_batches == 1 else ("forward", "backward", "last")

    @property
    def count(self) -> int:
        """How many numbers there are."""
        return len(self.phases) * (1 + 3 * self.levels) + 2

    def work(self, phase: Phase) -> int:
        """Work in a phase."""
        return self.phases.index(phase) * (1 + 3 * self.levels)

    def level(self, phase: Phase, mode: Mode, level: int) -> int:
        """Collectives of a mode on a level of links in a phase."""
        return self.work(phase) + 1 + 3 * level + MODES.index(mode)

    @property
    def update(self) -> int:
        """The optimizer's work, which nothing runs beside."""
        return self.count - 2

    @property
    def host(self) -> int:
        """The host, over the whole step."""
        return self.count - 1

    def often(self, step: Step) -> list[tuple[Phase, int]]:
        """In which phases a step of forward or backward is done, and how often in all."""
        if step.phase == "forward":
            return [("forward", self.micro_batches)]
        before = self.micro_batches - 1
        passes = {"every": before, "later": max(before - 1, 0), "last": 0}[step.turn]
        is_last = step.turn != "later" or before > 0
        found: list[tuple[Phase, int]] = [("backward", passes)] if passes else []
        return [*found, ("last", 1)] if is_last else found


@dataclass(frozen=True)
class Bounds:
    """Sums of what is asked that no step is shorter than, phase by phase.

    Zones are stretches of operators in order; the numbers `places` are those of a single operator.
    """

    asked: Asked
    zones: int
    places: tuple[int, ...]

    @cached_property
    def sums(self) -> Values:
        """Of each bound, which numbers of which zones it adds up; the last is the host's."""
        host = self._sum([(self.asked.host, range(self.zones))])
        return np.array([row for rows in self._phases for row, _ in rows] + [host])

    @cached_property
    def begin_late(self) -> NDArray[np.bool_]:
        """Of each bound, whether its work follows gathers: what is run again may come before."""
        return np.array([late for rows in self._phases for _, late in rows] + [True])

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The bounds of each phase: the sum of the phases is bounded by one of each."""
        found, at = [], 0
        for rows in self._phases:
            found.append(tuple(range(at, at + len(rows))))
            at += len(rows)
        return tuple(found)

    @cached_property
    def _phases(self) -> list[list[tuple[Values, bool]]]:
        update = self._sum([(self.asked.update, range(self.zones))])
        return [*(list(self._of(phase)) for phase in self.asked.phases), [(update, True)]]

    def _of(self, phase: Phase) -> Iterator[tuple[Values, bool]]:
        """What bounds a phase: work, each level, and both around each place."""
        everywhere, work = range(self.zones), self.asked.work(phase)
        yield self._sum([(work, everywhere)]), False
        for level in range(self.asked.levels):
            ahead, behind, wait = (self.asked.level(phase, mode, level) for mode in MODES)
            yield self._sum([(k, everywhere) for k in (ahead, behind, wait)]), True
            for at in self.places:
                before, after = range(at), range(at + 1, self.zones)
                upto, since = range(at + 1), range(at, self.zones)
                if phase == "forward":  # what is gathered up to a place, then the work from there
                    yield self._sum([(ahead, upto), (wait, before), (work, since)]), True
                else:  # the other way round; what is reduced comes after the work
                    yield self._sum([(ahead, since), (wait, after), (work, upto)]), True
                    yield self._sum([(work, since), (behind, upto), (wait, before)]), False

    def _sum(self, terms: Sequence[tuple[int, range]]) -> Values:
        row = np.zeros((self.zones, self.asked.count))
        for number, zones in terms:
            row[list(zones), number] = 1.0
        return row


def zones_of(graph: Graph, regions: Regions) -> tuple[list[int], tuple[int, ...]]:
    """The zone of every operator, and the zones of a single operator that parameters flow to.

    They are the first and the last operator with a parameter, unless they stand for several, or lie
    among those that run again: some of what is before them then comes before them in backward, too.
    """
    reading = [
        index
        for index, op in enumerate(graph.ops)
        if any(graph.tensors[t].role == "parameter" for t in op.inputs)
    ]
    model = {op for repeat in graph.repeats for op in repeat.ops(MODEL)}
    around = {i for each in regions.regions for i in range(each.visited[0], each.end + 1)}
    ends = sorted({*reading[:1], *reading[-1:]} - model - around)
    zones, places, zone = [], [], 0
    for index in range(len(graph.ops)):
        if index in ends:
            zone += bool(index) and (index - 1 not in ends)
            places.append(zone)
            zones.append(zone)
            zone += 1
        else:
            zones.append(zone)
    return zones, tuple(places)


@dataclass(frozen=True, slots=True)
class _Asks:
    """What is asked, a row for each number: by choices of a decision, or by pairs of layouts."""

    numbers: Ints
    seconds: Values

    @classmethod
    def of(cls, parts: Parts, shape: tuple[int, ...]) -> _Asks:
        """All numbers in one array."""
        found = np.array([np.broadcast_to(part, shape) for part in parts.values()])
        return cls(np.array(list(parts), np.int64), found.reshape(len(parts), *shape))

    def row(self, number: int) -> Values | None:
        """Seconds of one number; none where nothing is asked."""
        at = np.flatnonzero(self.numbers == number)
        return self.seconds[at[0]] if len(at) else None

    def weighted(self, weights: Values) -> Values | None:
        """Seconds at so much for each number; none where nothing counts."""
        own = weights[self.numbers]
        return np.tensordot(own, self.seconds, axes=1) if own.any() else None


@dataclass(frozen=True, slots=True)
class _Pairs:
    """One reshard of an edge: what it asks for each pair of distinct layouts, and who has which."""

    asks: _Asks
    rows: Ints
    columns: Ints
    only: Values | None

    def weighted(self, weights: Values) -> Values | float:
        """Seconds for every choice at both ends, at so much for each number."""
        small = self.asks.weighted(weights)
        if small is None:
            return 0.0
        found: Values = small[self.rows][:, self.columns]
        return found if self.only is None else found * self.only[:, None]

    def total(self, x: Ints, y: Ints) -> Values:
        """What some pairs of choices ask together, number by number."""
        found: Values = self.asks.seconds[:, self.rows[x], self.columns[y]]
        return found.sum(axis=1) if self.only is None else found @ self.only[x]


@dataclass(frozen=True, slots=True)
class Position:
    """A table of a zone, and the vertices whose choices each of its places takes, end by end."""

    table: int
    zone: int
    ends: tuple[Ints, ...]


class Demands:
    """What a graph on a mesh asks; made from its tables, table by table and zone by zone."""

    def __init__(
        self,
        graph: Graph,
        subdims: Subdims,
        tables: Tables,
        model: CostModel,
        optimizer: Optimizer,
        levels: int,
    ) -> None:
        self.graph, self.subdims, self.tables = graph, subdims, tables
        self.model, self.optimizer = model, optimizer
        self.asked = Asked(levels, tables.micro_batches)
        self._small: dict[object, _Asks] = {}
        self._placed: dict[str, tuple[UnrolledProblem, list[Position]]] = {}
        self._met: dict[object, list[Values]] = {}  # what choices ask that agree somewhere
        zones, places = zones_of(graph, tables.regions)
        self.bounds = Bounds(self.asked, max(zones, default=0) + 1, places)
        self.vertex_zones = [self._zone(v, zones) for v in tables.vertices]
        self.edge_zones = [self._edge_zone(edge) for edge in tables.edges]
        sharing: dict[int, list[Vertex]] = {}
        for vertex, table in zip(tables.vertices, tables.problem.costs, strict=True):
            sharing.setdefault(id(table), []).append(vertex)
        sizes = {id(table): table.shape for table in tables.problem.costs}
        self.vertices = {
            key: _Asks.of(self._vertex(members), sizes[key]) for key, members in sharing.items()
        }
        self.edges: dict[int, list[_Pairs]] = {}
        for edge, table in zip(tables.edges, tables.problem.edge_costs, strict=True):
            if id(table) not in self.edges:
                legs = edge.legs(self.asked.micro_batches)
                self.edges[id(table)] = [self._leg(edge, leg) for leg in legs]
                self.edges[id(table)] += [c for leg in legs for c in self._cast(edge, leg)]

    def _zone(self, vertex: Vertex, zones: Sequence[int]) -> int:
        """Of the operator that a decision belongs to: the one that reads a parameter first."""
        if vertex.what == "op":
            return zones[vertex.index]
        if vertex.what != "parameter":
            return 0
        readers = self.graph.readers().get(vertex.index)
        return zones[readers[0][0] if readers else 0]

    def _edge_zone(self, edge: Edge) -> int:
        """Of the operator that moves what goes along an edge."""
        reads = self.tables.vertices[edge.target].what == "op"
        return self.vertex_zones[edge.target if reads else edge.source]

    # What is asked

    def weighted(self, weights: Values, more: Mapping[int, Values]) -> Problem:
        """The problem of the graph's own decisions, at a weight for each of the bounds.

        `more` is added to the costs of some vertices; those of one table have the same.
        """
        by_zone = np.tensordot(weights, self.bounds.sums, axes=1)
        problem = self.tables.problem
        own: dict[tuple[int, int], Values] = {}
        for v, (table, zone) in enumerate(zip(problem.costs, self.vertex_zones, strict=True)):
            if (id(table), zone) not in own:
                found = self.vertices[id(table)].weighted(by_zone[zone])
                found = np.zeros(len(table)) if found is None else found
                own[id(table), zone] = found + more[v] if v in more else found
        joint: dict[tuple[int, int], Values] = {}
        for table, zone in zip(problem.edge_costs, self.edge_zones, strict=True):
            if (id(table), zone) not in joint:
                joint[id(table), zone] = np.zeros(table.shape)
                for pairs in self.edges[id(table)]:
                    joint[id(table), zone] += pairs.weighted(by_zone[zone])
        vertices = zip(problem.costs, self.vertex_zones, strict=True)
        edges = zip(problem.edge_costs, self.edge_zones, strict=True)
        return Problem(
            tuple(own[id(table), zone] for table, zone in vertices),
            problem.edges,
            tuple(joint[id(table), zone] for table, zone in edges),
        )

    def of(self, unrolled: UnrolledProblem, choice: Ints) -> Values:
        """What a choice for the whole model asks, zone by zone."""
        total = np.zeros((self.bounds.zones, self.asked.count))
        for at in self._positions(unrolled, "vertex"):
            asks, own = self.vertices[at.table], choice[at.ends[0]]
            key = "vertex", at.table, at.zone, own.tobytes()
            if key not in self._met:
                self._met[key] = [asks.seconds[:, own].sum(axis=1)]
            total[at.zone, asks.numbers] += self._met[key][0]
        for at in self._positions(unrolled, "edge"):
            x, y = choice[at.ends[0]], choice[at.ends[1]]
            key = "edge", at.table, at.zone, x.tobytes() + y.tobytes()
            if key not in self._met:
                self._met[key] = [pairs.total(x, y) for pairs in self.edges[at.table]]
            for pairs, found in zip(self.edges[at.table], self._met[key], strict=True):
                total[at.zone, pairs.asks.numbers] += found
        return total

    def again(self, op: int) -> Values:
        """What it adds to each bound, at least, to run an operator once more in backward."""
        asked = np.zeros((self.bounds.zones, self.asked.count))
        forward = self.vertices[id(self.tables.problem.costs[op])].row(self.asked.work("forward"))
        if forward is not None:
            zone, passes = self.vertex_zones[op], self.asked.micro_batches
            least = float(forward.min()) / passes
            asked[zone, self.asked.work("last")] = least
            if passes > 1:
                asked[zone, self.asked.work("backward")] = least * (passes - 1)
        return self.bounded(asked) * ~self.bounds.begin_late

    def bounded(self, asked: Values) -> Values:
        """Each of the bounds, for what is asked."""
        return np.tensordot(self.bounds.sums, asked, axes=2)

    def least_seconds(self, unrolled: UnrolledProblem, choice: Ints) -> float:
        """A step that a choice for the whole model does not fall below.

        Of each phase the longest sum; equal blocks are counted to within `ROUNDING`.
        """
        sums = self.bounded(self.of(unrolled, choice))
        phases = sum(float(sums[list(group)].max()) for group in self.bounds.groups)
        return max(phases, float(sums[-1])) * (1 - ROUNDING)

    def _positions(self, unrolled: UnrolledProblem, what: str) -> list[Position]:
        """Where each table of each zone stands in the whole model, found once."""
        known = self._placed.get(what)
        if known is None or known[0] is not unrolled:
            known = self._placed[what] = unrolled, list(self._place(unrolled, what))
        return known[1]

    def _place(self, unrolled: UnrolledProblem, what: str) -> Iterator[Position]:
        problem, vertices = self.tables.problem, what == "vertex"
        tables, zones, copied = (
            (problem.costs, self.vertex_zones, unrolled.vertices)
            if vertices
            else (problem.edge_costs, self.edge_zones, unrolled.edges)
        )
        kinds: dict[tuple[int, int], int] = {}
        pairs = zip(tables, zones, strict=True)
        of = np.array([kinds.setdefault((id(t), z), len(kinds)) for t, z in pairs], np.int64)
        of = of if copied is None else of[copied]
        order = np.argsort(of, kind="stable")
        bounds = np.searchsorted(of[order], np.arange(len(kinds) + 1))
        for key, number in kinds.items():
            at = order[bounds[number] : bounds[number + 1]]
            yield Position(*key, (at,) if vertices else tuple(unrolled.problem.ends[at].T))

    # Decisions

    def _vertex(self, members: Sequence[Vertex]) -> Parts:
        """The least that any of the decisions with one table asks.

        Operators that meet memory in different ways share a table, and are run as any of them.
        """
        first, mesh = members[0], self.tables.mesh
        if first.what == "tensor":
            return {}
        if first.storage is not None:
            tensor, parts = self.graph.tensors[first.index], self.subdims.tensors[first.index]
            if not tensor.requires_grad:
                return {}
            kind, fresh = self.graph.kept_type(first.index), tensor.type.item_bytes
            found = self._asked(update_steps(first.storage, parts, kind, self.optimizer, mesh))
            if self.asked.micro_batches > 1:
                added = sum_up_steps(first.storage, parts, kind, mesh, fresh)
                found = _sum(found, self._asked(added))
            return found
        distinct = {id(vertex.priced): vertex.priced for vertex in members}.values()
        return _least([self._asked(p.steps, split=p.split_seconds) for p in distinct if p])

    # Edges

    def _leg(self, edge: Edge, leg: Leg) -> _Pairs:
        shape = self.tables.mesh.shape
        mode: Mode = "wait" if edge.storage is None else "ahead"
        mode = "behind" if edge.storage is not None and leg.what != "value" else mode
        if leg.what == "sum":  # whatever the reader needs
            return self._same_for_all(edge, self._asked(edge.steps(leg, shape), mode), None)
        rows, of_row = distinct(leg.source)
        columns, of_column = distinct(leg.target)
        kind = (edge.subdims, edge.sent_bytes(leg), leg.phase, leg.may_defer, mode)
        key = (*kind, rows.tobytes(), columns.tobytes())
        if key not in self._small:
            size = edge.sent_bytes(leg)
            steps = reshard_all(rows, columns, shape, edge.subdims, size, leg.phase)
            found = self._asked(defer(steps) if leg.may_defer else steps, mode)
            each = _Asks.of(found, (len(rows) * len(columns),))
            seconds = each.seconds.reshape(-1, len(rows), len(columns))
            self._small[key] = _Asks(each.numbers, seconds)
        asks, only = self._small[key], None if leg.only is None else leg.only.astype(float)
        if leg.what == "gradient":
            asks = _Asks(asks.numbers, asks.seconds.transpose(0, 2, 1))
            of_row, of_column = of_column, of_row
        return _Pairs(asks, of_row, of_column, only)

    def _cast(self, edge: Edge, leg: Leg) -> Iterator[_Pairs]:
        """The cast of a parameter before its use; those of gradients are not counted."""
        before, _ = edge.casts(leg, self.tables.mesh.shape)
        if leg.what == "value" and before is not None:
            only = None if leg.only is None else leg.only.astype(float)
            yield self._same_for_all(edge, self._asked(Steps(len(edge.left), (before,))), only)

    def _same_for_all(self, edge: Edge, parts: Parts, only: Values | None) -> _Pairs:
        """What each choice at the near end asks, whatever the reader needs."""
        near, everyone = np.arange(len(edge.left)), np.zeros(len(edge.needed), np.int64)
        asks = _Asks.of(parts, (len(near),))
        return _Pairs(_Asks(asks.numbers, asks.seconds[:, :, None]), near, everyone, only)

    # Steps

    def _asked(self, steps: Steps, mode: Mode = "wait", split: Split | None = None) -> Parts:
        """What some steps ask in each of their cases, where collectives are of a mode."""
        split = partial(split_seconds, self.model) if split is None else split
        found: Parts = {}
        sent: dict[tuple[int, ...], Values] = {}  # by the numbers that it counts for
        for step in steps.steps:
            if isinstance(step, Compute):
                self._work(found, step, *split(step))
            elif step.kind != "slice":
                beside = is_beside(self.model, step)
                self._sent(sent, steps.cases, step, mode if beside else "wait", beside)
        for numbers, seconds in sent.items():
            for number in numbers:
                _add(found, number, seconds)
        return {k: seconds for k, seconds in found.items() if seconds.any()}

    def _work(self, found: Parts, step: Compute, device: Values, host: Values) -> None:
        if step.phase == "update":
            _add(found, self.asked.update, device)
        else:
            for phase, often in self.asked.often(step):
                _add(found, self.asked.work(phase), device * often)
        _add(found, self.asked.host, host * times(step, self.asked.micro_batches))

    def _sent(
        self,
        sent: dict[tuple[int, ...], Values],
        cases: int,
        step: Collective,
        mode: Mode,
        beside: bool,
    ) -> None:
        """What runs beside its operator's work is no work, but done before the operator is."""
        stops = mode == "wait" and not (beside and step.pieces > 1)
        seconds = self.model.collective_seconds(step) * step.repeats
        levels = sorted({self.tables.mesh.axes[a].level for a in step.axes})
        for phase, often in self.asked.often(step):
            work = [self.asked.work(phase)] if stops else []
            numbers = (*work, *(self.asked.level(phase, mode, level) for level in levels))
            if numbers not in sent:
                sent[numbers] = np.zeros(cases)
            sent[numbers][step.rows] += seconds * often


def _add(found: Parts, number: int, seconds: Values) -> None:
    found[number] = found[number] + seconds if number in found else seconds.astype(float)


def _sum(first: Mapping[int, Values], second: Mapping[int, Values]) -> Parts:
    found = dict(first)
    for number, seconds in second.items():
        _add(found, number, seconds)
    return found


def _least(each: Sequence[Parts]) -> Parts:
    """Of each number what all of them ask at least."""
    common = set(each[0]).intersection(*each)
    return {k: np.min([parts[k] for parts in each], axis=0) for k in common}
