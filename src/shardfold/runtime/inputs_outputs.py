"""Inputs of a call and results that a caller asks for, between full batches and shards.

An input is the full batch on every rank, or each rank's part of it. Where all that read an input
read the very part that the plan gives to a rank, the rank needs no more than that. Anything else is
read whole (masks and shifted labels are made so, on every device): then the parts are gathered
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardfold.capture import Program
from shardfold.errors import RunError, nearest
from shardfold.graph import Graph
from shardfold.plans import Plan
from shardfold.plans.read import layout_row
from shardfold.runtime.lower import Instruction, Lowered
from shardfold.runtime.process_groups import Groups
from shardfold.runtime.reshard import Given, Lie, Moves, perform, values
from shardfold.runtime.shards import Place, Row
from shardfold.sharding import Subdims
from shardfold.sharding.layouts import REPLICATED


def with_parts(lowered: Lowered, program: Program, subdims: Subdims, plan: Plan) -> Lowered:
    """The same instructions, for inputs that are given whole or in the plan's parts."""
    graph = program.graph
    names = {entry.name: entry for entry in plan.inputs}
    whole: Row = (REPLICATED,) * len(lowered.place.shape)
    found: dict[int, Given] = {}
    for tensor, source in program.sources.items():
        entry = names.get(graph.tensors[tensor].name)
        if source.role != "input" or entry is None:
            continue
        lie = Lie(
            graph.tensors[tensor].type, subdims.tensors[tensor], subdims.dims[tensor], lowered.place
        )
        row = layout_row(entry.layout, tensor, subdims, entry.name, lowered.mesh)
        cut, joined = (lie.moves(*pair, "forward") for pair in ((whole, row), (row, whole)))
        stay = Moves((), cut.source, cut.source), Moves((), cut.target, cut.target)
        reads = [f.there for i in lowered.instructions for f in i.feeds if f.tensor == tensor]
        is_read_so = bool(cut) and all(moves == cut for moves in reads)
        moves = (cut, stay[1]) if is_read_so else (stay[0], joined)
        found[tensor] = Given(entry.name, cut.source, cut.target, *moves)
    taken = {tensor for tensor, given in found.items() if given.from_whole}
    instructions = tuple(_without_cuts(i, taken) for i in lowered.instructions)
    return replace(lowered, instructions=instructions, inputs=found)


def _without_cuts(instruction: Instruction, taken: set[int]) -> Instruction:
    """The instruction, for inputs that are cut before it."""
    if not taken.intersection(feed.tensor for feed in instruction.feeds):
        return instruction
    feeds = tuple(
        replace(feed, there=Moves((), feed.there.target, feed.there.target))
        if feed.tensor in taken
        else feed
        for feed in instruction.feeds
    )
    return replace(instruction, feeds=feeds)


@dataclass(frozen=True, slots=True)
class Outputs:
    """The tensors that were asked for by name, and what was found of them."""

    graph: Graph
    names: dict[int, list[str]]
    found: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, prefix: str, names: Sequence[str]) -> Outputs:
        """The results with these names: that forward returns, of a module, or of an operator."""
        found: dict[int, list[str]] = {}
        for name in names:
            known = program.results.get(name)
            tensor = _named(program.graph, prefix, name) if known is None else known
            found.setdefault(tensor, []).append(name)
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
    if missing := {step.axes for step in moves.steps} - groups.by_axes.keys():
        groups.make(missing)
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
