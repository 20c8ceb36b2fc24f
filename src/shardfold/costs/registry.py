"""The cost models by name, each with the rules that it counts in its own way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shardfold.cluster import Cluster, Mesh
from shardfold.costs import paper
from shardfold.costs.model import CostModel
from shardfold.costs.roofline import Roofline
from shardfold.errors import InputError, nearest
from shardfold.spaces import Maker


@dataclass(frozen=True, slots=True)
class Pricing:
    """A cost model for any cluster and mesh, and the rules that it replaces.

    `overlaps`: its steps can be simulated, communication beside work.
    """

    model: Callable[[Cluster, Mesh], CostModel]
    rules: Mapping[str, Maker] = field(default_factory=dict)
    overlaps: bool = True


PRICINGS: Mapping[str, Pricing] = {
    "roofline": Pricing(Roofline),
    "paper": Pricing(paper.Paper, paper.RULES, overlaps=False),
}


def pricing_named(name: str) -> Pricing:
    """The pricing of that name."""
    if name not in PRICINGS:
        raise InputError(f"Unknown cost model {name!r}. {nearest(name, PRICINGS)}")
    return PRICINGS[name]
