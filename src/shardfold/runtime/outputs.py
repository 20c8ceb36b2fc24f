"""Results of operators that a caller asks for, gathered from their shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardfold.capture import Program
from shardfold.errors import RunError, nearest
from shardfold.graph import Graph
from shardfold.runtime.local_reshard import Lie, values
from shardfold.runtime.lower import Instruction
from shardfold.runtime.process_groups import Groups
from shardfold.runtime.reshard_ops import perform
from shardfold.runtime.shards import Place, Row
from shardfold.sharding.layouts import REPLICATED


@dataclass(frozen=True, slots=True)
class Outputs:
    """The tensors that were asked for by name, and what was found of them."""

    graph: Graph
    names: dict[int, list[str]]
    found: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, prefix: str, names: Sequence[str]) -> Outputs:
        """The results with these names: of a module, or of an operator."""
        found: dict[int, list[str]] = {}
        for name in names:
            found.setdefault(_named(program.graph, prefix, name), []).append(name)
        return cls(program.graph, found)

    def keep(
        self, groups: Groups, place: Place, instruction: Instruction, results: list[Tensor]
    ) -> list[Tensor]:
        """Look at an operator's results, and keep those that were asked for, whole."""
        for tensor, left, result in zip(
            instruction.results, instruction.left, results, strict=True
        ):
            if tensor in self.names:
                extents = instruction.site.results[instruction.results.index(tensor)]
                lie = Lie(self.graph.tensors[tensor].type, extents.subdims, extents.dims, place)
                whole = put_together(lie, values(left), result.detach(), groups)
                self.found.update(dict.fromkeys(self.names[tensor], whole))
        return results


def put_together(lie: Lie, row: Row, local: Tensor, groups: Groups) -> Tensor:
    """A whole tensor from its parts, on every rank."""
    moves = lie.moves(row, (REPLICATED,) * len(row), "forward")
    groups.make(step.axes for step in moves.steps)
    if local.dtype != torch.bool:
        return perform(moves, local, groups)
    return perform(moves, local.to(torch.uint8), groups).to(torch.bool)


def _named(graph: Graph, prefix: str, name: str) -> int:
    """The last result inside a module, or an operator's first result."""
    path = prefix + name
    inside = [
        op
        for op in graph.ops
        if op.name == name or op.origin.module == path or op.origin.module.startswith(f"{path}.")
    ]
    if not inside:
        known = {op.origin.module.removeprefix(prefix) for op in graph.ops} - {""}
        raise RunError(f"No module and no operator is called {name!r}. {nearest(name, known)}")
    return inside[-1].results[0]
