"""Inputs of a call: the full batch on every rank, or each rank's part of it.

Where all that read an input read the very part that the plan gives to a rank, the rank needs no
more than that. Anything else is read whole (masks and shifted labels are made so, on every
device): then the parts are gathered first.
"""

from __future__ import annotations

from dataclasses import replace

from shardfold.capture import Program
from shardfold.plans import Plan
from shardfold.plans.read import layout_row
from shardfold.runtime.local_reshard import Lie, Moves
from shardfold.runtime.lower import Instruction, Lowered
from shardfold.runtime.reshard_ops import Given
from shardfold.runtime.shards import Row
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
