"""What is asked for besides the model, and the choice that the search settles on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shardfold.cluster import Cluster, Mesh
from shardfold.costs import Optimizer, Pricing
from shardfold.graph import Graph
from shardfold.operators import Maker, rules_of
from shardfold.planner.mesh_search import Chosen, Recompute, choose
from shardfold.sharding import Subdims, find_subdims
from shardfold.strategies.pins import Pin


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

    def subdims_of(self, graph: Graph) -> Subdims:
        """The graph's dims in pieces, by the rules of the cost model and of the user."""
        return find_subdims(graph, rules_of(graph, {**self.pricing.rules, **self.rules}))


@dataclass(frozen=True, slots=True)
class Settled:
    """A choice, and the graph that it is for."""

    graph: Graph
    subdims: Subdims
    chosen: Chosen


def settle(graph: Graph, request: Request, watch: Callable[[int, int], None]) -> Settled:
    """The best choice for a graph by the sum of its costs."""
    r, subdims = request, request.subdims_of(graph)
    asked = (r.cluster, r.meshes, r.pricing, r.optimizer, r.limit_bytes)
    return Settled(
        graph, subdims, choose(graph, subdims, *asked, watch, r.pins, r.recompute, r.passes)
    )
