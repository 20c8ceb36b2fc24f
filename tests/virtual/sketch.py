"""Graphs written by hand, operator by operator, without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shardfold.graph import Graph, Op, Operand, Tensor, TensorType
from shardfold.graph.graph import Role

MEAN = 1


class Sketch:
    """Collects tensors and operators; every method returns the index of a tensor."""

    def __init__(self, dtype: str = "float32") -> None:
        self.dtype = dtype
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []

    def shape(self, tensor: int) -> tuple[int, ...]:
        return self.tensors[tensor].type.shape

    def input(self, *shape: int, dtype: str | None = None) -> int:
        return self._tensor(shape, "input", False, dtype)

    def parameter(self, *shape: int, names: tuple[str, ...] = ()) -> int:
        return self._tensor(shape, "parameter", True, None, names)

    def linear(self, x: int, weight: int, bias: int | None = None) -> int:
        operands = {"input": x, "weight": weight} | ({} if bias is None else {"bias": bias})
        return self.op("linear", operands, (*self.shape(x)[:-1], self.shape(weight)[0]))

    def matmul(self, a: int, b: int) -> int:
        shape = (*self.shape(a)[:-1], self.shape(b)[-1])
        return self.op("matmul", {"self": a, "other": b}, shape)

    def add(self, a: int, b: int) -> int:
        return self.op("add", {"self": a, "other": b}, self.shape(a), alpha=1)

    def relu(self, x: int) -> int:
        return self.op("relu", {"self": x}, self.shape(x))

    def view(self, x: int, *shape: int) -> int:
        assert math.prod(shape) == math.prod(self.shape(x))
        return self.op("view", {"self": x}, shape, size=shape)

    def reshape(self, x: int, *shape: int) -> int:
        assert math.prod(shape) == math.prod(self.shape(x))
        return self.op("reshape", {"self": x}, shape, shape=shape)

    def transpose(self, x: int, i: int, j: int) -> int:
        shape = list(self.shape(x))
        shape[i], shape[j] = shape[j], shape[i]
        return self.op("transpose", {"self": x}, shape, dim0=i, dim1=j)

    def permute(self, x: int, order: Sequence[int]) -> int:
        shape = [self.shape(x)[k] for k in order]
        return self.op("permute", {"self": x}, shape, dims=tuple(order))

    def split(self, x: int, size: int, dim: int) -> tuple[int, ...]:
        shape = list(self.shape(x))
        count, shape[dim] = shape[dim] // size, size
        results = [self._activation(shape, (x,)) for _ in range(count)]
        self._call("split", {"self": x}, results, {"split_size": size, "dim": dim})
        return tuple(results)

    def attention(self, q: int, k: int, v: int) -> int:
        operands = {"query": q, "key": k, "value": v}
        return self.op("scaled_dot_product_attention", operands, self.shape(q), is_causal=False)

    def cross_entropy(self, logits: int, target: int) -> int:
        operands = {"self": logits, "target": target}
        return self.op("cross_entropy_loss", operands, (), reduction=MEAN, label_smoothing=0.0)

    def sum(self, x: int) -> int:
        return self.op("sum", {"self": x}, ())

    def op(
        self, kind: str, operands: dict[str, int], shape: Sequence[int], /, **attributes: Any
    ) -> int:
        result = self._activation(shape, tuple(operands.values()))
        self._call(kind, operands, [result], attributes)
        return result

    def graph(self, loss: int) -> Graph:
        return Graph(tuple(self.tensors), tuple(self.ops), loss)

    def _activation(self, shape: Sequence[int], inputs: tuple[int, ...]) -> int:
        flows = any(self.tensors[t].requires_grad for t in inputs)
        return self._tensor(tuple(shape), "activation", flows, None)

    def _call(
        self, kind: str, operands: dict[str, int], results: list[int], attributes: Any
    ) -> None:
        given = tuple(Operand(name, tensor) for name, tensor in operands.items())
        name = f"{kind}_{len(self.ops)}"
        self.ops.append(Op(name, f"aten.{kind}", given, tuple(results), attributes))

    def _tensor(
        self,
        shape: tuple[int, ...],
        role: Role,
        grad: bool,
        dtype: str | None,
        names: tuple[str, ...] = (),
    ) -> int:
        named = names or (f"{role}{len(self.tensors)}",)
        self.tensors.append(Tensor(named, TensorType(shape, dtype or self.dtype), role, grad))
        return len(self.tensors) - 1
