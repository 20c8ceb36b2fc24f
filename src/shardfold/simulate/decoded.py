"""From a solved problem to a plan: every decision in words, with the steps that it implies."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from shardfold.costs import CostModel, Tabulated
from shardfold.costs.edges import edge_steps
from shardfold.costs.operator_steps import Tensors, operator_steps
from shardfold.costs.parameters import Optimizer, sum_up_steps, update_steps
from shardfold.costs.steps import Collective, Compute, Step, times
from shardfold.costs.variables import Edge
from shardfold.graph import Graph
from shardfold.plans.plan import CollectiveEntry, OperatorEntry, ParameterEntry, TensorEntry
from shardfold.sharding import Space, Subdims
from shardfold.sharding.configs import NONE, PASS
from shardfold.sharding.layouts import PENDING, REPLICATED, SHARED, Layouts
from shardfold.strategies.split_names import Splits

STATES = {REPLICATED: "whole", SHARED: "whole, gradient summed", PENDING: "sum pending"}


@dataclass(frozen=True)
class Assembly:
    """A solved problem with all that is needed to say what it means."""

    graph: Graph
    subdims: Subdims
    tabulated: Tabulated
    choice: tuple[int, ...]
    model: CostModel
    optimizer: Optimizer
    known: dict[object, list[Step]] = field(default_factory=dict, compare=False, repr=False)
    prices: dict[int, float] = field(default_factory=dict, compare=False, repr=False)
    parts: dict[object, tuple[list[Step], list[Step]]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def choosing(self, choice: tuple[int, ...]) -> Assembly:
        """The same problem under another choice; steps that are alike are made once for both."""
        other = replace(self, choice=choice)
        other.__dict__["splits"] = self.splits
        return other

    @cached_property
    def splits(self) -> Splits:
        """The operators' splits in words."""
        return Splits(self.graph, self.subdims, self.tabulated.mesh)

    @cached_property
    def steps(self) -> dict[int, list[Step]]:
        """The steps of every operator vertex: its own, and those of the edges charged to it.

        An edge is charged to the operator that reads; the edge into a shared tensor to the
        operator that writes; a parameter's update to its first reader. Of a step of several passes,
        these are the steps of one: `times` says how often each is done.
        """
        found: dict[int, list[Step]] = defaultdict(list)
        for v, vertex in enumerate(self.tabulated.vertices):
            if vertex.space is not None:
                found[v].extend(self.work(v))
        updated: set[int] = set()
        for number, edge in enumerate(self.tabulated.edges):
            at = edge.target
            if self.tabulated.vertices[at].space is None:
                at = edge.source
            found[at].extend(self.moved(number))
            if edge.regathers is not None and edge.source not in updated:
                updated.add(edge.source)
                found[at].extend((*self.summed_up(edge.source), *self.update(edge.source)))
        return found

    def work(self, v: int) -> list[Step]:
        """The steps of the operator at vertex `v`, without its reshards."""
        vertex = self.tabulated.vertices[v]
        assert vertex.space is not None
        key = (id(self.tabulated.problem.costs[v]), self.choice[v])
        if key not in self.known:
            self.known[key] = self.own(vertex.index, vertex.space, self.choice[v])
        return self.known[key]

    def update(self, v: int) -> list[Step]:
        """The update of the parameter at vertex `v`."""
        key = (id(self.tabulated.problem.costs[v]), self.choice[v])
        if key not in self.known:
            self.known[key] = self._update(v)
        return self.known[key]

    def summed_up(self, v: int) -> list[Step]:
        """What a pass adds to the gradient of the parameter at vertex `v`, where there are more."""
        vertex = self.tabulated.vertices[v]
        tensor = self.graph.tensors[vertex.index]
        if self.passes == 1 or vertex.storage is None or not tensor.requires_grad:
            return []
        key = ("summed", id(self.tabulated.problem.costs[v]), self.choice[v])
        if key not in self.known:
            kept, mesh = self.subdims.tensors[vertex.index], self.tabulated.mesh
            steps = sum_up_steps(vertex.storage, kept, tensor.type, mesh)
            self.known[key] = steps.case(self.choice[v])
        return self.known[key]

    @property
    def passes(self) -> int:
        """Over parts of the batch, in a step."""
        return self.tabulated.passes

    def own(self, index: int, space: Space, choice: int) -> list[Step]:
        """The steps of one operator under one of its configurations, without its reshards."""
        single = Space(space.rule, space.configs[choice : choice + 1])
        tensors = Tensors.of(self.graph, self.subdims, index)
        again = self.tabulated.regions.runs_again(index)
        return operator_steps(single, tensors, self.tabulated.mesh, again).case(0)

    def moved(self, number: int) -> list[Step]:
        """The steps that bring one edge's tensor from the layout it is left in to the needed."""
        edge = self.tabulated.edges[number]
        pair = (self.choice[edge.source], self.choice[edge.target])
        key = (id(self.tabulated.problem.edge_costs[number]), pair)
        if key not in self.known:
            self.known[key] = self._moved(edge)
        return self.known[key]

    def moves(self, number: int) -> tuple[list[Step], list[Step]]:
        """The steps of one edge apart: those of values, and those of the gradient."""
        edge = self.tabulated.edges[number]
        pair = (self.choice[edge.source], self.choice[edge.target])
        key = ("apart", id(self.tabulated.problem.edge_costs[number]), pair)
        if key not in self.parts:
            every, values = self.moved(number), self._moved(edge, values_only=True)
            self.parts[key] = (every[: len(values)], every[len(values) :])
        return self.parts[key]

    def _moved(self, edge: Edge, *, values_only: bool = False) -> list[Step]:
        left, needed = self.choice[edge.source], self.choice[edge.target]
        tensor = self.graph.tensors[edge.tensor]
        again = edge.regathers[left : left + 1] if edge.regathers is not None else np.zeros(1, bool)
        return edge_steps(
            edge.left[left : left + 1],
            edge.needed[needed : needed + 1],
            again,
            self.tabulated.mesh,
            self.subdims.tensors[edge.tensor],
            tensor.type.item_bytes,
            tensor.requires_grad and edge.flows and not values_only,
            edge.again,
            edge.sums,
            edge.regathers is not None and self.passes > 1,
        ).case(0)

    def _update(self, v: int) -> list[Step]:
        vertex = self.tabulated.vertices[v]
        tensor = self.graph.tensors[vertex.index]
        if vertex.storage is None or not tensor.requires_grad:
            return []
        return update_steps(
            vertex.storage,
            self.subdims.tensors[vertex.index],
            tensor.type,
            self.optimizer,
            self.tabulated.mesh,
        ).case(self.choice[v])

    def seconds(self, step: Step) -> float:
        """As `price`, for steps of this assembly: operators that are alike share them."""
        found = self.prices.get(id(step))
        if found is None:
            found = self.prices[id(step)] = self.price(step)
        return found

    def total(self, step: Step) -> float:
        """The seconds of a step in all passes that do it."""
        return self.seconds(step) * times(step, self.passes)

    def price(self, step: Step) -> float:
        """What one step of one case costs."""
        if isinstance(step, Compute):
            return float(self.model.compute_seconds(step)[0])
        if step.kind == "slice":
            return 0.0
        return float(self.model.collective_seconds(step)[0]) * step.repeats

    def operators(self, within: range | None = None) -> tuple[OperatorEntry, ...]:
        """An entry for every operator, in execution order, or for those of a range."""
        names = self.tabulated.mesh.names
        entries = []
        for v, vertex in enumerate(self.tabulated.vertices):
            if vertex.space is None or (within is not None and vertex.index not in within):
                continue
            op = self.graph.ops[vertex.index]
            row = vertex.space.configs[self.choice[v]]
            steps = self.steps[v]
            entries.append(
                OperatorEntry(
                    op.name,
                    op.kind,
                    op.origin.module,
                    op.origin.source,
                    tuple(factor_name(vertex.space, int(f)) for f in row),
                    self.splits.of(vertex.index, vertex.space, row.tolist()),
                    sum(self.total(step) for step in steps),
                    _collectives(steps, names, self),
                )
            )
        return tuple(entries)

    def tensors(self) -> tuple[TensorEntry, ...]:
        """An entry for every tensor that several operators read."""
        return tuple(
            self.tensor(v)
            for v, vertex in enumerate(self.tabulated.vertices)
            if vertex.what == "tensor"
        )

    def tensor(self, v: int) -> TensorEntry:
        """The entry of the tensor that vertex `v` decides."""
        vertex = self.tabulated.vertices[v]
        layout = self.states(vertex.index, vertex.layouts, self.choice[v])
        return TensorEntry(self.graph.tensors[vertex.index].name, layout)

    def parameters(self) -> tuple[ParameterEntry, ...]:
        """An entry for every parameter; one that no operator reads is stored whole."""
        return tuple(self.parameter(index) for index in self.graph.parameters())

    @cached_property
    def _stored(self) -> dict[int, int]:
        """The vertex that decides the storage of each parameter."""
        vertices = enumerate(self.tabulated.vertices)
        return {vertex.index: v for v, vertex in vertices if vertex.storage is not None}

    def parameter(self, index: int) -> ParameterEntry:
        """The entry of one parameter."""
        tensor = self.graph.tensors[index]
        layout: tuple[str, ...] = ("whole",) * len(self.tabulated.mesh.axes)
        again = False
        if index in self._stored:
            v = self._stored[index]
            storage = self.tabulated.vertices[v].storage
            assert storage is not None
            layout = self.states(index, storage.layouts, self.choice[v])
            again = bool(storage.regathers[self.choice[v]])
        return ParameterEntry(tensor.names, tensor.type.shape, layout, again)

    def states(self, tensor: int, layouts: Layouts | None, choice: int) -> tuple[str, ...]:
        """Per axis: `dim 1` (`dim 1.0` where only a piece of the dim is split), or whole."""
        assert layouts is not None
        dims = self.subdims.dims[tensor]
        found = []
        for state in map(int, layouts[choice]):
            if state < 0:
                found.append(STATES[state])
                continue
            dim = dims[state]
            piece = f".{state - dims.index(dim)}" if dims.count(dim) > 1 else ""
            found.append(f"dim {dim}{piece}")
        return tuple(found)

    def reason(self, space: Space) -> str:
        """Why an operator has but one configuration."""
        if not space.rule.rule.known:
            return "no rule"
        return (
            "no dim that divides" if not any(space.rule.splittable) else "depends on no parameter"
        )

    def totals(self, vertices: Iterable[int] | None = None) -> dict[str, float]:
        """Seconds of local work, of communication and of the update, of some vertices or all."""
        totals = {"compute": 0.0, "communication": 0.0, "update": 0.0}
        for v in self.steps if vertices is None else vertices:
            for step in self.steps.get(v, ()):
                kind = "communication" if isinstance(step, Collective) else "compute"
                kind = "update" if step.phase == "update" else kind
                totals[kind] += self.total(step)
        return totals


def factor_name(space: Space, factor: int) -> str:
    """A factor in the rule's own name; `-` for none, `+` where a pending sum passes."""
    return {NONE: "-", PASS: "+"}.get(factor) or space.rule.factors[factor]


def _collectives(
    steps: list[Step], names: tuple[str, ...], at: Assembly
) -> tuple[CollectiveEntry, ...]:
    entries: dict[tuple[str, str, tuple[str, ...], float], list[float]] = defaultdict(list)
    for step in steps:
        if isinstance(step, Collective) and step.kind != "slice":
            axes = tuple(names[a] for a in step.axes)
            key = (step.phase, step.kind, axes, float(step.bytes[0]))
            count = step.repeats * times(step, at.passes)
            entries[key].extend([at.seconds(step) / step.repeats] * count)
    return tuple(
        CollectiveEntry(phase, kind, axes, size, len(each), math.fsum(each))
        for (phase, kind, axes, size), each in entries.items()
    )
