"""Backward's memory: gradients of activations, and of parameters on their way to be reduced."""

from __future__ import annotations

from dataclasses import dataclass

from shardfold.costs.aliases import CASTS, DROPOUTS, PERMUTED, RESHAPED
from shardfold.plans.lying import Lying, row_of
from shardfold.plans.turns import Gathered, Turn, add

# Backward, these hand the gradient of their result on as it is, or as a view.
PASSED_ON = frozenset((*RESHAPED, *PERMUTED, *CASTS, *DROPOUTS, "contiguous", "add", "sub"))


class Gradients:
    """Backward: gradients of activations, and of parameters on their way to be reduced."""

    def __init__(self, at: Lying, turns: list[Turn], gathered: list[list[Gathered | None]]) -> None:
        self.at, self.turns, self.gathered = at, turns, gathered
        self.of: dict[int, _Gradient] = {}  # of each tensor, as far as it is summed up
        self.stored: set[int] = set()  # parameters that have a gradient

    def run(self) -> None:
        """Walk over the operators in backward order."""
        graph = self.at.graph
        self.of[graph.loss] = _Gradient(0.0, 1)
        for op in reversed(range(len(graph.ops))):
            if self.at.flows(op):
                self._operator(op)

    def _operator(self, op: int) -> None:
        at, graph = self.at, self.at.graph
        turn = self.turns[op]
        results = [self._result(op, t) for t in graph.ops[op].results if t in self.of]
        name = graph.ops[op].kind.rpartition(".")[2]
        for position, tensor in enumerate(graph.ops[op].inputs):
            if not graph.tensors[tensor].requires_grad:
                continue
            if graph.tensors[tensor].role == "parameter":
                self._parameter(op, position, turn)
                continue
            row = at.operand_row(op, position)
            size = at.facts.local_bytes(tensor, row, at.shape)
            handed = name in PASSED_ON and results and results[0].bytes == size
            gradient = results[0].shared() if handed else self._new(turn, size)
            gradient = self._moved(op, tensor, at.wiring.operands[op][position], gradient)
            if tensor in self.of:  # summed up in place
                self._release(gradient, turn)
            else:
                self.of[tensor] = gradient
        for gradient in results:
            self._release(gradient, turn)
        passing = at.extra_bytes(op, "backward")
        add(turn.takes, "buffers", passing)
        add(turn.gives, "buffers", passing)

    def _result(self, op: int, tensor: int) -> _Gradient:
        """The gradient of a result, moved from the layout it is kept in for several readers."""
        gradient = self.of.pop(tensor)
        edge = self.at.wiring.kept.get(tensor)
        return gradient if edge is None else self._moved(op, tensor, edge, gradient, left=True)

    def _moved(
        self, op: int, tensor: int, edge: int | None, gradient: _Gradient, left: bool = False
    ) -> _Gradient:
        if edge is None or not self.at.assembly.moves(edge)[1]:
            return gradient
        at = self.at.assembly.tabulated.edges[edge]
        row = row_of(at.left, self.at.assembly.choice[at.source])
        size = self.at.facts.local_bytes(tensor, row, self.at.shape)
        found = self._new(self.turns[op], size)
        self._release(gradient, self.turns[op])
        return found

    def _parameter(self, op: int, position: int, turn: Turn) -> None:
        """Its gradient in full where it is to be reduced, else the part that stays."""
        found = self.gathered[op][position]
        tensor = self.at.graph.ops[op].inputs[position]
        if found is None:
            return
        if tensor in self.stored:
            found.reduced = 0.0
        self.stored.add(tensor)
        if found.gradient:
            add(turn.takes, "buffers", found.gradient)
        else:  # with several passes, it lives until it is added to those before
            alone = self.at.assembly.passes == 1
            add(turn.takes, "gradients" if alone else "buffers", found.reduced)

    def _new(self, turn: Turn, size: float) -> _Gradient:
        add(turn.takes, "buffers", size)
        return _Gradient(size, 1)

    def _release(self, gradient: _Gradient, turn: Turn) -> None:
        gradient.holders -= 1
        if not gradient.holders and gradient.bytes:
            add(turn.gives, "buffers", gradient.bytes)


@dataclass(slots=True)
class _Gradient:
    bytes: float
    holders: int

    def shared(self) -> _Gradient:
        self.holders += 1
        return self
