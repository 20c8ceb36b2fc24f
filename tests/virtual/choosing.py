"""Choices by hand: configurations by factor name, and the steps that they imply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardfold.cluster import mesh_from_text, parse
from shardfold.costs import OPTIMIZERS, CostModel, Roofline, Tables, Vertex, tabulate
from shardfold.costs.steps import Collective, Step
from shardfold.graph import Graph
from shardfold.operators import rules_of
from shardfold.sharding import Subdims, find_subdims
from shardfold.sharding.configs import NONE, PASS
from shardfold.sharding.layouts import Layouts, forward_states
from shardfold.simulate.decoded import DecodedChoice
from shardfold.strategies.baselines import complete

Configs = Mapping[str, str]  # operator -> factor per axis, `-` for none, `+` to pass a sum
NAMES = {NONE: "-", PASS: "+"}


@dataclass(frozen=True)
class Desk:
    """A graph with its tables on one mesh."""

    graph: Graph
    subdims: Subdims
    tables: Tables
    model: CostModel
    optimizer: str = "sgd"

    @classmethod
    def of(cls, graph: Graph, cluster: str, mesh: str, optimizer: str = "sgd") -> Desk:
        where = parse(cluster)
        on = mesh_from_text(mesh, where)
        subdims = find_subdims(graph, rules_of(graph))
        model = Roofline(where, on)
        tables = tabulate(graph, subdims, on, model, OPTIMIZERS[optimizer])
        return cls(graph, subdims, tables, model, optimizer)

    def choose(self, configs: Configs) -> DecodedChoice:
        """Fix the configurations; parameters are kept as used, tensors in their cheapest layout."""
        fixed = {}
        for v, vertex in enumerate(self.tables.vertices):
            if vertex.space is not None:
                wanted = configs.get(self.graph.ops[vertex.index].name)
                row = ["-"] * len(self.tables.mesh.axes) if wanted is None else wanted.split()
                fixed[v] = self.rows(vertex).index(tuple(row))
        used = {
            edge.tensor: forward_states(edge.needed)[fixed[edge.target]]
            for edge in reversed(self.tables.edges)
            if edge.regathers is not None
        }
        return self.decoded(complete(self.tables, fixed, lambda v: _as_used(v, used)))

    def rows(self, vertex: Vertex) -> list[tuple[str, ...]]:
        """The configurations of an operator, by name."""
        assert vertex.space is not None
        names = NAMES | dict(enumerate(vertex.space.rule.factors))
        return [tuple(names[f] for f in row) for row in vertex.space.configs.tolist()]

    def decoded(self, choice: tuple[int, ...]) -> DecodedChoice:
        optimizer = OPTIMIZERS[self.optimizer]
        return DecodedChoice(self.graph, self.subdims, self.tables, choice, self.model, optimizer)


def _as_used(vertex: Vertex, used: Mapping[int, Layouts]) -> NDArray[np.bool_] | None:
    """Parameters are kept as their first reader needs them."""
    if vertex.storage is None:
        return None
    same: NDArray[np.bool_] = (vertex.storage.layouts == used[vertex.index]).all(axis=1)
    return same & ~vertex.storage.regathers


def collectives(decoded: DecodedChoice) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Phase, kind, axes and bytes of every collective that sends something, sorted."""
    steps: list[Step] = [step for found in decoded.steps.values() for step in found]
    return sorted(
        (step.phase, step.kind, step.axes, int(step.bytes[0]))
        for step in steps
        if isinstance(step, Collective) and step.kind != "slice"
    )
