"""What choices cost: steps, their prices, and the tables that the search minimises."""

from shardfold.costs.decision_graph import Edge, Vertex
from shardfold.costs.measured import Measured
from shardfold.costs.model import CostModel, Paper, Roofline, price
from shardfold.costs.optimizers import OPTIMIZERS, Optimizer, optimizer_named
from shardfold.costs.profile import Profile
from shardfold.costs.registry import (
    PRICINGS,
    Pricing,
    assumed,
    measured_by,
    pricing_named,
    pricing_of,
)
from shardfold.costs.tables import Tables, tabulate

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
    "assumed",
    "measured_by",
    "optimizer_named",
    "price",
    "pricing_named",
    "pricing_of",
    "tabulate",
]
