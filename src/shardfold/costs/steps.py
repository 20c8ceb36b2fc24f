"""Steps: local compute and collectives, described once for prices, simulator, runtime and report.

Work is kept in columns: a `Compute` or `Collective` holds one entry for each of many cases (the
configurations of an operator, or the layout pairs of an edge), so that pricing thousands of
cases is a few numpy operations, and looking at one case is taking one row. A collective's bytes
are those of its larger side on one device: what is reduced, what is gathered, what is scattered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardfold.operators.notation import Sent
from shardfold.sharding.layouts import Layouts

if TYPE_CHECKING:
    from shardfold.costs.operator_steps import Work

Kind = Sent | Literal["slice"]  # a slice sends nothing
Phase = Literal["forward", "recompute", "backward", "update"]
# In which passes of a step it is done: in every one, in all but the first, in the last only.
Turn = Literal["every", "later", "last"]
Rows = NDArray[np.intp]
Values = NDArray[np.float64]
BUCKET_BYTES = 4 << 20  # parameters below that share a gather, their gradients a reduction


@dataclass(frozen=True, slots=True)
class Compute:
    """Local work: arithmetic on one engine, and bytes moved to and from the device's memory."""

    phase: Phase
    engine: str
    dtype: str
    flops: Values
    bytes: Values
    kernels: int = 1
    work: Work | None = None  # the operator in full, for models that look closer
    optimizer: str = ""  # of an update: whose, and of how many elements
    items: Values | None = None
    turn: Turn = "every"


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective on some mesh axes, in the cases `rows`, with `bytes` for each of them.

    A `slice` is the one kind that sends nothing: each device keeps its part. Where a tensor
    changes its layout, `before` and `after` hold the layouts on either side. A collective with
    several `pieces` runs beside its operator's work, all but the last of so many pieces of it.
    """

    phase: Phase
    kind: Kind
    axes: tuple[int, ...]
    rows: Rows
    bytes: Values
    repeats: int = 1
    before: Layouts | None = None
    after: Layouts | None = None
    turn: Turn = "every"
    pieces: int = 1


Step: TypeAlias = Compute | Collective


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of `cases` cases, in execution order."""

    cases: int
    steps: tuple[Step, ...]

    def case(self, row: int) -> list[Step]:
        """The steps of one case, each with a single entry."""
        found: list[Step] = []
        for step in self.steps:
            if isinstance(step, Compute):
                one = slice(row, row + 1)
                work = None if step.work is None else step.work.row(row)
                items = None if step.items is None else step.items[one]
                flops, moved = step.flops[one], step.bytes[one]
                found.append(replace(step, flops=flops, bytes=moved, work=work, items=items))
            else:
                at = np.flatnonzero(step.rows == row)
                if len(at):
                    found.append(replace(_rows(step, at[:1]), rows=np.zeros(1, dtype=np.intp)))
        return found


def _rows(step: Collective, at: Rows | NDArray[np.bool_]) -> Collective:
    """The collective in some of its cases."""
    return replace(
        step,
        rows=step.rows[at],
        bytes=step.bytes[at],
        before=None if step.before is None else step.before[at],
        after=None if step.after is None else step.after[at],
    )


def by_axes(masks: NDArray[np.int64], axes: int) -> list[tuple[tuple[int, ...], Rows]]:
    """Group rows by the set of axes in their bit mask; rows without any axis are left out."""
    groups: list[tuple[tuple[int, ...], Rows]] = []
    for mask in np.flatnonzero(np.bincount(masks, minlength=1)).tolist():
        if mask:
            members = tuple(a for a in range(axes) if mask >> a & 1)
            groups.append((members, np.flatnonzero(masks == mask)))
    return groups


def times(step: Step, micro_batches: int) -> int:
    """How often a step is done where a training step takes so many passes over parts of a batch.

    An optimizer's update is done once, whatever it says.
    """
    turn = "last" if step.phase == "update" else step.turn
    return {"every": micro_batches, "later": micro_batches - 1, "last": 1}[turn]


def is_deferred(kinds: Sequence[Kind]) -> bool:
    """Whether a parameter's gradient that goes this way is added up over micro-batches first.

    Where nothing but all-reduces follow, the sum is as large as each of its terms: it is reduced
    in the last micro-batch alone. Where gradients are scattered, deferring that would keep them
    whole.
    """
    return bool(kinds) and all(kind == "all_reduce" for kind in kinds)


def defer(steps: Steps) -> Steps:
    """The steps of a parameter's gradient, with those marked that wait for the last micro-batch."""
    others = np.zeros(steps.cases, dtype=bool)
    for step in steps.steps:
        if isinstance(step, Collective) and not is_deferred((step.kind,)):
            others[step.rows] = True
    found: list[Step] = []
    for step in steps.steps:
        assert isinstance(step, Collective)
        waits = ~others[step.rows]
        if waits.any():
            found.append(replace(_rows(step, waits), turn="last"))
        if not waits.all():
            found.append(_rows(step, ~waits))
    return Steps(steps.cases, tuple(found))


def recompute(steps: Steps) -> Steps:
    """The forward steps once more, as they are run again before backward."""
    again = (replace(s, phase="recompute") for s in steps.steps if s.phase == "forward")
    return Steps(steps.cases, tuple(again))
