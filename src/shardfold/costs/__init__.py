"""What choices cost: steps, their prices, and the tables that the search minimises."""

from shardfold.costs.decisions import Edge, Tabulated, Vertex
from shardfold.costs.measured import Measured
from shardfold.costs.model import CostModel, price
from shardfold.costs.paper import Paper
from shardfold.costs.profile import Profile
from shardfold.costs.registry import PRICINGS, Pricing, measured_by, pricing_named, pricing_of
from shardfold.costs.roofline import Roofline
from shardfold.costs.storage import OPTIMIZERS, Optimizer, optimizer_named
from shardfold.costs.tabulate import tabulate

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
    "Tabulated",
    "Vertex",
    "measured_by",
    "optimizer_named",
    "price",
    "pricing_named",
    "pricing_of",
    "tabulate",
]
