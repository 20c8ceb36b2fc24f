"""What choices cost: steps, their prices, and the tables that the search minimises."""

from shardfold.costs.decisions import Edge, Tabulated, Vertex
from shardfold.costs.model import CostModel, price
from shardfold.costs.paper import Paper
from shardfold.costs.registry import PRICINGS, Pricing, pricing_named
from shardfold.costs.roofline import Roofline
from shardfold.costs.storage import OPTIMIZERS, Optimizer, optimizer_named
from shardfold.costs.tabulate import tabulate

__all__ = [
    "OPTIMIZERS",
    "PRICINGS",
    "CostModel",
    "Edge",
    "Optimizer",
    "Paper",
    "Pricing",
    "Roofline",
    "Tabulated",
    "Vertex",
    "optimizer_named",
    "price",
    "pricing_named",
    "tabulate",
]
