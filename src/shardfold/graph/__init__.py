"""The operator graph: plain frozen values that every later stage reads."""

from shardfold.graph.graph import Graph
from shardfold.graph.op import Op, Operand, Origin
from shardfold.graph.repeat import Repeat
from shardfold.graph.tensor import Tensor, TensorType

__all__ = ["Graph", "Op", "Operand", "Origin", "Repeat", "Tensor", "TensorType"]
