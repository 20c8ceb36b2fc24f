"""What is asked for besides the model, and the choice that the search settles on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shardfold.cluster import Cluster, Mesh
from shardfold.costs import Optimizer, Pricing
from shardfold.graph import Graph
from shardfold.plans.choose import Chosen, Recompute, choose
from shardfold.plans.pins import Pin
from shardfold.spaces import Atoms, Maker, atomise, rules_of


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for besides the model."""

    cluster: Cluster
    meshes: Sequence[Mesh]
    pricing: Pricing
    optimizer: Optimizer
    limit_bytes: float | None = None
    pins: Sequence[Pin] = ()
    recompute: Recompute = "auto"
    rules: Mapping[str, Maker] = field(default_factory=dict)
    passes: int = 1  # the graph's batch is a part of a step's, which takes so many

    def atomised(self, graph: Graph) -> Atoms:
        """The graph's dims in pieces, by the rules of the cost model and of the user."""
        return atomise(graph, rules_of(graph, {**self.pricing.rules, **self.rules}))


@dataclass(frozen=True, slots=True)
class Settled:
    """A choice, and the graph that it is for."""

    graph: Graph
    atoms: Atoms
    chosen: Chosen


def settle(graph: Graph, request: Request, watch: Callable[[int, int], None]) -> Settled:
    """The best choice for a graph by the sum of its costs."""
    r, atoms = request, request.atomised(graph)
    asked = (r.cluster, r.meshes, r.pricing, r.optimizer, r.limit_bytes)
    return Settled(graph, atoms, choose(graph, atoms, *asked, watch, r.pins, r.recompute, r.passes))
