"""The operator graph: plain frozen values that every later stage reads."""

from shardfold.graph.graph import Dims, Graph, Op, Operand, Origin, Splits, Tensor, TensorType
from shardfold.graph.precision import Precision
from shardfold.graph.repeats import Repeat

__all__ = [
    "Dims",
    "Graph",
    "Op",
    "Operand",
    "Origin",
    "Precision",
    "Repeat",
    "Splits",
    "Tensor",
    "TensorType",
]
