"""The operator graph: plain frozen values that every later stage reads."""

from shardfold.graph.graph import Graph
from shardfold.graph.repeats import Repeat
from shardfold.graph.values import Op, Operand, Origin, Tensor, TensorType

__all__ = ["Graph", "Op", "Operand", "Origin", "Repeat", "Tensor", "TensorType"]
