"""The schedule of a step on one device: tasks in order, with repeated blocks stored once.

A schedule is plain and complete: the simulator needs nothing else, and a plan file holds it. Its
size does not grow with the number of devices (all of one kind do the same) nor with the number
of equal blocks (a segment has a count).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

# How a task relates to the device's own work:
#   work     local computation, one after the other;
#   wait     a collective whose result the next task needs, so that work stands still;
#   ahead    a gather of parameters, which may run before it is needed;
#   behind   a reduction of gradients, which only the update waits for.
Mode = Literal["work", "wait", "ahead", "behind"]
# In which passes of a step a task is done: in every one, in all but the first, in the last only.
Turn = Literal["every", "later", "last"]
CLASSES = ("parameters", "gradients", "optimizer", "activations", "buffers")
"""Of memory. Activations: what is kept for backward, or still to be read. Buffers: all that lives
shortly: gathered parameters, tensors on their way between layouts, gradients of activations."""
COMPUTE = "compute"
"""The name of the stream of local work; the others bear the names of link levels."""


# Bounds of what a file may say: a stranger's figures end in an error, not in endless work.
Quantity = Annotated[float, msgspec.Meta(ge=0)]
Whole = Annotated[int, msgspec.Meta(ge=0)]
Number = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of plain values: immutable, strict about what a file may contain."""


class Task(Value, frozen=True):
    """A piece of work or a collective; bytes by class are taken as it starts, given as it ends."""

    kind: str  # forward, backward, update, all_gather, ...
    seconds: Quantity
    mode: Mode = "work"
    levels: tuple[int, ...] = ()  # the levels of links that a collective crosses
    bytes: Quantity = 0.0  # of a collective's larger side
    takes: dict[str, float] = msgspec.field(default_factory=dict)
    gives: dict[str, float] = msgspec.field(default_factory=dict)
    turn: Turn = "every"


class Again(Value, frozen=True):
    """An operator that is run once more before backward, because its results were dropped."""

    name: str
    tasks: tuple[Task, ...]


class Operator(Value, frozen=True):
    """One operator's tasks in each phase; `flops` are useful ones, of forward and backward.

    `again` is what has to be recomputed before this operator's backward: the operators of a
    block in their order, at the last of them.
    """

    name: str
    forward: tuple[Task, ...] = ()
    backward: tuple[Task, ...] = ()
    update: tuple[Task, ...] = ()
    again: tuple[Again, ...] = ()
    flops: float = 0.0


class Segment(Value, frozen=True):
    """Operators that follow one another, `count` times: equal blocks are one segment."""

    name: str
    operators: tuple[Operator, ...]
    count: Number = 1
    names: tuple[str, ...] = ()  # of each of the `count` blocks, where they have some


class Schedule(Value, frozen=True):
    """A whole step: segments forward, then backward in reverse, then the update.

    With several `passes`, forward and backward are done so often, each time on a part of the batch,
    before the one update.
    """

    levels: tuple[str, ...]  # outermost first
    segments: tuple[Segment, ...]
    resident: dict[str, float]  # bytes by class that are there all the time
    peak_flops: float  # of a device, in the dtype of most products
    ahead: Whole = 8  # operators whose parameters may be gathered before their turn
    behind: Whole = 16  # operators whose gradients may wait to be reduced
    passes: Number = 1
