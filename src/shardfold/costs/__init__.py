"""What choices cost: steps, their prices, and the tables that the search minimises."""

from shardfold.costs.edges import Edge
from shardfold.costs.model import CostModel, price
from shardfold.costs.models.measured import Measured
from shardfold.costs.models.paper import Paper
from shardfold.costs.models.registry import (
    PRICINGS,
    Pricing,
    measured_by,
    pricing_named,
    pricing_of,
)
from shardfold.costs.models.roofline import Roofline
from shardfold.costs.parameters import OPTIMIZERS, Optimizer, optimizer_named
from shardfold.costs.profile.profile import Profile
from shardfold.costs.tables import Tables, tabulate
from shardfold.costs.variables import Vertex

__all__ = [
    "OPTIMIZERS",
    "PRICINGS",
    "CostModel",
    "Edge",
    "Measured",
    "Optimizer",
    "Paper",
    "Pricing",
    "Profile",
    "Roofline",
    "Tables",
    "Vertex",
    "measured_by",
    "optimizer_named",
    "price",
    "pricing_named",
    "pricing_of",
    "tabulate",
]
