"""An operator as a rule maker sees it: types by operand name, attributes, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardfold.graph import Graph, Op, TensorType
from shardfold.operators.notation import Dim, Rule, _dims


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator: what a rule may depend on."""

    op: Op
    inputs: tuple[TensorType, ...]
    results: tuple[TensorType, ...]

    @classmethod
    def of(cls, graph: Graph, op: Op) -> Call:
        """The call that `op` makes in `graph`."""
        return cls(
            op,
            tuple(graph.tensors[i].type for i in op.inputs),
            tuple(graph.tensors[i].type for i in op.results),
        )

    def attribute(self, name: str, default: Any = None) -> Any:
        """An argument that is not a tensor."""
        value = self.op.attributes.get(name, default)
        return default if value is None else value

    def has(self, name: str) -> bool:
        """Whether the tensor argument `name` was given."""
        return any(operand.name == name for operand in self.op.operands)

    def position(self, name: str) -> int:
        """The position of the tensor argument `name` among the operands."""
        return [operand.name for operand in self.op.operands].index(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor argument `name`."""
        return self.inputs[self.position(name)].shape

    def rule(
        self,
        operands: Mapping[str, str],
        *results: str | None,
        sizes: Mapping[str, int] | None = None,
        saves: tuple[str, ...] = (),
        crossed: tuple[str, ...] = (),
        **properties: Any,
    ) -> Rule:
        """A rule from a notation per operand name; `...` stands for any further dims.

        Operands that were not given are left out; an operand that the notation does not name
        keeps all its dims undescribed. Sizes of single-factor dims are read off the shapes.
        """
        known = dict(sizes or {})
        given = frozenset(known)
        left = tuple(
            self._expand(operands.get(operand.name), kind.shape, known, given)
            for operand, kind in zip(self.op.operands, self.inputs, strict=True)
        )
        notations = results if len(results) > 1 else results * len(self.results)
        right = tuple(
            self._expand(notation, kind.shape, known, given)
            for notation, kind in zip(notations, self.results, strict=True)
        )
        kept, others = (
            tuple(self.position(name) for name in names if self.has(name))
            for names in (saves, crossed)
        )
        return Rule(left, right, known, saves=kept, crossed=others, **properties)

    def undescribed(self, **properties: Any) -> Rule:
        """A rule in which no factor can be split: every device does the whole operator."""
        operands = tuple(tuple(() for _ in kind.shape) for kind in self.inputs)
        results = tuple(tuple(() for _ in kind.shape) for kind in self.results)
        return Rule(operands, results, {}, **properties)

    @staticmethod
    def _expand(
        notation: str | None,
        shape: tuple[int, ...],
        sizes: dict[str, int],
        given: frozenset[str],
    ) -> tuple[Dim, ...]:
        if notation is None:
            return tuple(() for _ in shape)
        before, dots, after = notation.partition("...")
        head, tail = _dims(before), _dims(after)
        middle = len(shape) - len(head) - len(tail)
        if middle < 0 or (middle and not dots):
            raise ValueError(f"The notation {notation!r} does not fit the shape {shape}.")
        dims = (*head, *((f"i{k}",) for k in range(middle)), *tail)
        for dim, size in zip(dims, shape, strict=True):
            # A dim of size 1 may be broadcast: the factor's size is that of another operand.
            if len(dim) == 1 and dim[0] not in given and sizes.get(dim[0], 1) == 1:
                sizes[dim[0]] = size
        return tuple(() if size == 1 else dim for dim, size in zip(dims, shape, strict=True))
