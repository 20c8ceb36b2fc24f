"""A choice decoded: the steps of every operator, edge and parameter, and what each costs.

Of a deep model, the graph holds only a few periods. What a period's operators cost depends on its
own choices and on those of the periods before and after it. So each distinct triple of choices is
described once, at the model period of the graph with its neighbours set to match.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardfold.costs import CostModel, Tables
from shardfold.costs.decision_graph import Vertex
from shardfold.costs.model import runs_beside, split_seconds, uncovered
from shardfold.costs.operator_steps import Tensors, operator_steps
from shardfold.costs.optimizers import Optimizer
from shardfold.costs.parameters import sum_up_steps, update_steps
from shardfold.costs.steps import Collective, Compute, Step, Steps, times
from shardfold.costs.unroll import Copies, UnrolledProblem
from shardfold.graph import Graph
from shardfold.graph.repeats import MODEL
from shardfold.sharding import Space, Subdims
from shardfold.sharding.names import Key, Rows, Split, Splits


@dataclass(frozen=True)
class DecodedChoice:
    """A choice for a problem, with all that is needed to say which steps it implies."""

    graph: Graph
    subdims: Subdims
    tables: Tables
    choice: tuple[int, ...]
    model: CostModel
    optimizer: Optimizer
    known: dict[object, list[Step]] = field(default_factory=dict, compare=False, repr=False)
    prices: dict[int, float] = field(default_factory=dict, compare=False, repr=False)
    worked_before: dict[int, tuple[float, float]] = field(
        default_factory=dict, compare=False, repr=False
    )
    parts: dict[object, tuple[list[Step], list[Step]]] = field(
        default_factory=dict, compare=False, repr=False
    )
    surroundings: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)

    def choosing(self, choice: tuple[int, ...]) -> DecodedChoice:
        """The same problem under another choice; steps that are alike are made once for both."""
        other = replace(self, choice=choice)
        other.__dict__["splits"] = self.splits
        return other

    @cached_property
    def splits(self) -> Splits:
        """The operators' splits in words."""
        return Splits(self.graph, self.subdims, self.tables.mesh)

    def offered(self, op: int) -> dict[Key, tuple[Split, Rows]]:
        """Every distinct split of an operator, with the configurations that make it."""
        return self.splits.offered(op, self.tables.wiring.sides.spaces[op])

    @cached_property
    def steps(self) -> dict[int, list[Step]]:
        """The steps of every operator vertex: its own, and those of the edges charged to it.

        An edge is charged to the operator that reads; the edge into a shared tensor to the
        operator that writes; a parameter's update to its first reader. Of a step of several passes,
        these are the steps of one: `times` says how often each is done.
        """
        found: dict[int, list[Step]] = defaultdict(list)
        for v, vertex in enumerate(self.tables.vertices):
            if vertex.space is not None:
                found[v].extend(self.work(v))
        updated: set[int] = set()
        for number, edge in enumerate(self.tables.edges):
            at = edge.target
            if self.tables.vertices[at].space is None:
                at = edge.source
            found[at].extend(self.moved(number))
            if edge.storage is not None and edge.source not in updated:
                updated.add(edge.source)
                found[at].extend((*self.summed_up(edge.source), *self.update(edge.source)))
        return found

    def work(self, v: int) -> list[Step]:
        """The steps of the operator at vertex `v`, without its reshards."""
        vertex = self.tables.vertices[v]
        assert vertex.space is not None
        key = (id(self.tables.problem.costs[v]), self.choice[v])
        if key not in self.known:
            self.known[key] = self._priced(vertex, self.choice[v])
        return self.known[key]

    def _priced(self, vertex: Vertex, choice: int) -> list[Step]:
        """The steps of an operator, with their seconds noted where tables have them."""
        assert vertex.space is not None
        if vertex.priced is None:
            return self.own(vertex.index, vertex.space, choice)
        steps = []
        for step, seconds in vertex.priced.case(choice):
            steps.append(step)
            if seconds is not None:
                self.worked_before[id(step)] = seconds
                self.prices[id(step)] = seconds[0]
        return steps

    def update(self, v: int) -> list[Step]:
        """The update of the parameter at vertex `v`."""
        key = (id(self.tables.problem.costs[v]), self.choice[v])
        if key not in self.known:
            self.known[key] = self._update(v)
        return self.known[key]

    def summed_up(self, v: int) -> list[Step]:
        """What a pass adds to the gradient of the parameter at vertex `v`, where there are more."""
        vertex = self.tables.vertices[v]
        tensor = self.graph.tensors[vertex.index]
        if self.micro_batches == 1 or vertex.storage is None or not tensor.requires_grad:
            return []
        key = ("summed", id(self.tables.problem.costs[v]), self.choice[v])
        if key not in self.known:
            kept, mesh = self.subdims.tensors[vertex.index], self.tables.mesh
            kind, fresh = self.graph.kept_type(vertex.index), tensor.type.item_bytes
            steps = sum_up_steps(vertex.storage, kept, kind, mesh, fresh)
            self.known[key] = steps.case(self.choice[v])
        return self.known[key]

    @property
    def micro_batches(self) -> int:
        """Over parts of the batch, in a step."""
        return self.tables.micro_batches

    def own(self, index: int, space: Space, choice: int) -> list[Step]:
        """The steps of one operator under one of its configurations, without its reshards."""
        single = Space(space.rule, space.configs[choice : choice + 1])
        tensors = Tensors.of(self.graph, self.subdims, index)
        again = self.tables.regions.runs_again(index)
        return operator_steps(single, tensors, self.tables.mesh, again).case(0)

    def moved(self, number: int) -> list[Step]:
        """The steps that bring one edge's tensor from the layout it is left in to the needed."""
        values, gradient = self.moves(number)
        return [*values, *gradient]

    def moves(self, number: int) -> tuple[list[Step], list[Step]]:
        """The steps of one edge apart: those of values, and those of the gradient."""
        edge = self.tables.edges[number]
        pair = (self.choice[edge.source], self.choice[edge.target])
        key = (id(self.tables.problem.edge_costs[number]), pair)
        if key not in self.parts:
            self.parts[key] = ([], [])
            one, shape = edge.at(*pair), self.tables.mesh.shape
            for leg in one.legs(self.micro_batches):
                self.parts[key][leg.what != "value"].extend(one.moved(leg, shape))
        return self.parts[key]

    def _update(self, v: int) -> list[Step]:
        vertex = self.tables.vertices[v]
        tensor = self.graph.tensors[vertex.index]
        if vertex.storage is None or not tensor.requires_grad:
            return []
        return update_steps(
            vertex.storage,
            self.subdims.tensors[vertex.index],
            self.graph.kept_type(vertex.index),
            self.optimizer,
            self.tables.mesh,
        ).case(self.choice[v])

    def seconds(self, step: Step) -> float:
        """As `price`, for steps of this choice: operators that are alike share them."""
        found = self.prices.get(id(step))
        if found is None:
            found = self.prices[id(step)] = self.price(step)
        return found

    def worked(self, step: Compute) -> tuple[float, float]:
        """The device's seconds of a step of work, and the host's, where it asks ahead of it."""
        found = self.worked_before.get(id(step))
        if found is None:
            device, host = split_seconds(self.model, step)
            found = self.worked_before[id(step)] = float(device[0]), float(host[0])
        return found

    def total(self, step: Step) -> float:
        """The seconds of a step in all passes that do it."""
        return self.seconds(step) * times(step, self.micro_batches)

    def price(self, step: Step) -> float:
        """What one step of one case costs."""
        if isinstance(step, Compute):
            return float(self.model.compute_seconds(step)[0])
        if step.kind == "slice":
            return 0.0
        return float(self.model.collective_seconds(step)[0]) * step.repeats

    def totals(self, vertices: Iterable[int] | None = None) -> dict[str, float]:
        """Seconds of local work, of communication and of the update, of some vertices or all."""
        totals = {"compute": 0.0, "communication": 0.0, "update": 0.0}
        for v in self.steps if vertices is None else vertices:
            steps = self.steps.get(v, ())
            for step in steps:
                kind = "communication" if isinstance(step, Collective) else "compute"
                kind = "update" if step.phase == "update" else kind
                if not (isinstance(step, Collective) and runs_beside(self.model, step)):
                    totals[kind] += self.total(step)
            beside = uncovered(Steps(1, tuple(steps)), self.model, self.micro_batches)
            totals["communication"] += float(beside[0])
        return totals


Ints = NDArray[np.int64]
T = TypeVar("T")


@dataclass(frozen=True)
class UnrolledChoice:
    """A choice for every layer of a model; `decoded` describes the graph's own vertices."""

    decoded: DecodedChoice
    unrolled: UnrolledProblem
    choice: Ints  # of every vertex of the unrolled problem

    @cached_property
    def runs(self) -> list[RunSteps]:
        """The runs, with who describes each of their periods."""
        return [RunSteps(self.decoded, run, run.rows(self.choice)) for run in self.unrolled.runs]

    @cached_property
    def outside(self) -> list[int]:
        """The vertices that are in no run."""
        in_runs = {v for run in self.runs for v in run.copies.traced.reshape(-1).tolist()}
        return [v for v in range(len(self.decoded.tables.vertices)) if v not in in_runs]

    def totals(self) -> dict[str, float]:
        """Seconds of local work, of communication and of the update."""
        totals = {"compute": 0.0, "communication": 0.0, "update": 0.0}
        for decoded, vertices, count in self.weighted():
            for kind, seconds in decoded.totals(vertices).items():
                totals[kind] += count * seconds
        return totals

    def weighted(self) -> Iterator[tuple[DecodedChoice, Sequence[int], int]]:
        """Who describes which vertices, and how many times they stand in the model."""
        yield self.decoded, self.outside, 1
        for run in self.runs:
            periods = [run.period(order) for order in range(run.repeat.count)]
            who = {id(decoded): decoded for decoded, _ in periods}
            counts = Counter((id(decoded), period) for decoded, period in periods)
            for (key, period), count in counts.items():
                yield who[key], run.copies.traced[period].tolist(), count


Make = Callable[["RunSteps", DecodedChoice, int, Sequence[str]], T]


class RunSteps:
    """One run: which decoded choice describes which of its periods."""

    def __init__(self, decoded: DecodedChoice, copies: Copies, rows: Ints) -> None:
        self.decoded, self.copies, self.rows = decoded, copies, rows
        self.repeat = copies.repeat
        self.known: dict[object, DecodedChoice] = {}

    def period(self, order: int) -> tuple[DecodedChoice, int]:
        """The decoded choice, and the traced period in it, that describe the order-th period."""
        return self._periods[order]

    @cached_property
    def _periods(self) -> list[tuple[DecodedChoice, int]]:
        last = self.repeat.count - 1
        between = [
            (self._with([MODEL - 1, MODEL, MODEL + 1], self.rows[order - 1 : order + 2]), MODEL)
            for order in range(1, last)
        ]
        closing = self._with([MODEL], self.rows[last - 1 : last]), self.repeat.traced - 1
        return [(self.decoded, 0), *between, closing]

    def each(self, make: Make[T]) -> Iterator[tuple[int, T]]:
        """What `make` gives for each period, made once for all that are described alike.

        It is given the run, the decoded choice, the traced period in it, and the paths of that
        period's blocks.
        """
        known: dict[tuple[int, int], T] = {}
        for order, (decoded, period) in enumerate(self._periods):
            key = (id(decoded), period)
            if key not in known:
                bearer = MODEL if period == MODEL else order
                known[key] = make(self, decoded, period, self.repeat.paths[bearer])
            yield order, known[key]

    def _with(self, periods: list[int], rows: Ints) -> DecodedChoice:
        """The same with the choices of some traced periods set to the given ones."""
        key = (tuple(periods), rows.tobytes())
        if key not in self.known:
            choice = np.array(self.decoded.choice)
            choice[self.copies.traced[periods]] = rows
            self.known[key] = self.decoded.choosing(tuple(choice.tolist()))
        return self.known[key]

    def vertices(self, who: DecodedChoice, period: int, what: str) -> list[int]:
        """The vertices of one kind that belong to a traced period."""
        vertices = who.tables.vertices
        return [v for v in self.copies.traced[period].tolist() if vertices[v].what == what]
