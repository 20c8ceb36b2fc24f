"""What choices cost: steps, their prices, and the tables that the search minimises."""

from shardfold.costs.model import MODELS, CostModel, Paper, Roofline, model_named, price
from shardfold.costs.storage import OPTIMIZERS, Optimizer, optimizer_named
from shardfold.costs.tabulate import Edge, Tabulated, Vertex, tabulate

__all__ = [
    "MODELS",
    "OPTIMIZERS",
    "CostModel",
    "Edge",
    "Optimizer",
    "Paper",
    "Roofline",
    "Tabulated",
    "Vertex",
    "model_named",
    "optimizer_named",
    "price",
    "tabulate",
]
