"""From a graph to the choice to be described: the best on all meshes, then fewer blocks recomputed.

Where the best plan that fits recomputes all blocks, the first of them may do. Their number is
halved and halved again, between none and all; at each number the splits are chosen anew, for both
parts of a run that the border divides, so a block that is recomputed need not be split as one that
is not. The last blocks are the ones that keep their activations, as those are needed first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardfold.cluster import Cluster, Mesh
from shardfold.costs import Optimizer, Pricing
from shardfold.costs.recompute import Regions, block_regions, in_model
from shardfold.errors import InfeasibleError
from shardfold.graph import Graph
from shardfold.graph.divide import divided
from shardfold.graph.repeat import MODEL, operator_order
from shardfold.plans.choose import Chosen, Recompute, choose
from shardfold.plans.pins import Pin
from shardfold.spaces import Atoms, Maker, atomise, rules_of

ROUNDS = 3  # the number of blocks is found to an eighth


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for besides the model."""

    cluster: Cluster
    meshes: Sequence[Mesh]
    pricing: Pricing
    optimizer: Optimizer
    limit_bytes: float | None = None
    pins: Sequence[Pin] = ()
    recompute: Recompute | Regions = "auto"
    rules: Mapping[str, Maker] = field(default_factory=dict)

    def atomised(self, graph: Graph) -> Atoms:
        """The graph's dims in pieces, by the rules of the cost model and of the user."""
        return atomise(graph, rules_of(graph, {**self.pricing.rules, **self.rules}))


@dataclass(frozen=True, slots=True)
class Settled:
    """A choice, and the graph that it is for: that of the model, its runs perhaps in two parts."""

    graph: Graph
    atoms: Atoms
    chosen: Chosen
    undivided: Settled | None = None  # what was found before a run was divided


def settle(graph: Graph, request: Request, watch: Callable[[int, int], None]) -> Settled:
    """The best choice for a graph, with as few blocks recomputed as is found to do."""
    whole = _chosen(graph, request, watch)
    if request.recompute != "auto" or request.pins:
        return whole
    if not whole.chosen.best.tabulated.regions or whole.chosen.smallest_bytes is not None:
        return whole
    return _spared(whole, replace(request, meshes=(whole.chosen.best.mesh,)), watch)


def _chosen(graph: Graph, request: Request, watch: Callable[[int, int], None]) -> Settled:
    r, atoms = request, request.atomised(graph)
    asked = (r.cluster, r.meshes, r.pricing, r.optimizer, r.limit_bytes)
    return Settled(graph, atoms, choose(graph, atoms, *asked, watch, r.pins, r.recompute))


def _spared(whole: Settled, request: Request, watch: Callable[[int, int], None]) -> Settled:
    """The best found with part of the blocks recomputed, or `whole` where none is better."""
    blocks = len(in_model(whole.chosen.best.tabulated.regions, whole.graph).ranges)
    best, low, high = whole, 0, blocks
    for _ in range(ROUNDS):
        count = (low + high) // 2
        if not low < count < high:
            break
        graph, border = _parted(whole.graph, whole.atoms, count)
        regions = _leading(graph, request.atomised(graph), border)
        try:
            partly = _chosen(graph, replace(request, recompute=regions), watch)
        except InfeasibleError:
            low = count
            continue
        if partly.chosen.best.solution.cost < best.chosen.best.solution.cost:
            among = _among(whole.chosen, partly.chosen)
            best, high = replace(partly, chosen=among, undivided=whole), count
        else:
            low = count
    return best


def _among(all_or_none: Chosen, partly: Chosen) -> Chosen:
    """What was found with part of the blocks recomputed, beside what was tried before."""
    return replace(all_or_none, best=partly.best, tried=(*all_or_none.tried, partly.best))


def _parted(graph: Graph, atoms: Atoms, count: int) -> tuple[Graph, int]:
    """The graph with a border before block `count`, and the border's place in the whole model."""
    border = in_model(block_regions(graph, atoms), graph).ranges[count].start
    op, number, copy = operator_order(graph)[border]
    if number < 0 or not graph.repeats[number].missing:
        return graph, border
    repeat = graph.repeats[number]
    period = repeat.period_of(op)
    assert period is not None
    if copy is not None:
        period = MODEL + 1 + copy
    elif period > MODEL:
        period += repeat.missing
    return (divided(graph, number, period) if period else graph), border


def _leading(graph: Graph, atoms: Atoms, border: int) -> Regions:
    """The regions that only stand for blocks before the border."""
    regions = block_regions(graph, atoms)
    last = {op: place for place, (op, _, _) in enumerate(operator_order(graph))}
    return replace(regions, ranges=tuple(r for r in regions.ranges if last[r.start] < border))
