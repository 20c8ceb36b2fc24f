"""The operator graph: plain frozen values that every later stage reads."""

from shardfold.graph.graph import Graph, Op, Operand, Origin, Tensor, TensorType
from shardfold.graph.repeats import Repeat

__all__ = ["Graph", "Op", "Operand", "Origin", "Repeat", "Tensor", "TensorType"]
