"""Moving tensors from one layout to another: slices and collectives, for many pairs at once.

The order keeps data small for as long as possible:

1. axes that join a split: a slice where the tensor was replicated (free), a reduce-scatter
   where a sum was pending, an all-to-all where another atom was split,
2. one all-reduce over the axes whose sums are still pending,
3. all-gathers over the axes that leave a split, outer (slow) axes first,
4. slices that only now became possible (free).

An atom split by several axes is cut by the outer axis first, so an axis may join only after all
target axes outside it, and leave only together with those inside it. The function is one state
machine over arrays: a row is a pair of layouts, and the runner reads the same steps row by row.

    >>> steps = reshard(np.array([[0]], np.int8), np.array([[-1]], np.int8), (4,), (8,), 2, "forward")
    >>> [(s.kind, s.axes, s.bytes.tolist()) for s in steps.steps]
    [('all_gather', (0,), [16.0])]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardfold.costs.steps import Collective, Kind, Phase, Rows, Step, Steps, by_axes
from shardfold.spaces.layout import PENDING, REPLICATED, Layouts, local_items

Mask = NDArray[np.bool_]


def reshard(
    source: Layouts,
    target: Layouts,
    shape: Sequence[int],
    atoms: Sequence[int],
    item_bytes: int,
    phase: Phase,
) -> Steps:
    """The steps that take each row of `source` to the same row of `target`.

    `shape` are the mesh's axis sizes, `atoms` the tensor's. States are those of values or of
    gradients: REPLICATED, PENDING, or an atom.
    """
    machine = _Machine(source.copy(), target, tuple(shape), tuple(atoms), item_bytes, phase)
    machine.run()
    return Steps(len(source), tuple(machine.steps))


@dataclass(slots=True)
class _Machine:
    """All rows at once: `now` moves towards `target`, and every move is noted as a step."""

    now: Layouts
    target: Layouts
    shape: tuple[int, ...]
    atoms: tuple[int, ...]
    item_bytes: int
    phase: Phase
    steps: list[Step] = field(default_factory=list)

    def run(self) -> None:
        for _ in self.shape:
            for axis in range(len(self.shape)):
                self._join(axis)
        self._reduce()
        for axis in range(len(self.shape)):
            self._gather(axis)
        for axis in range(len(self.shape)):
            self._slice(axis)

    def _join(self, axis: int) -> None:
        ready = self._may_join(axis)
        if not ready.any():
            return
        now, target = self.now[:, axis], self.target[:, axis]
        swap = ready & (now >= 0) & self._is_innermost(axis)
        self._move(axis, ready & (now == REPLICATED), target, "slice")
        self._move(axis, ready & (now == PENDING), target, "reduce_scatter")
        self._move(axis, swap, target, "all_to_all")

    def _may_join(self, axis: int) -> Mask:
        """The target splits an atom here, and that atom has just the target's outer axes now."""
        atom = self.target[:, axis]
        ready: Mask = (atom >= 0) & (self.now[:, axis] != atom)
        for other in range(len(self.shape)):
            if other == axis:
                continue
            wanted = (self.target[:, other] == atom) if other < axis else False
            ready &= (self.now[:, other] == atom) == wanted
        return ready

    def _is_innermost(self, axis: int) -> Mask:
        inside = self.now[:, axis + 1 :] == self.now[:, axis : axis + 1]
        free: Mask = ~inside.any(axis=1)
        return free

    def _move(self, axis: int, rows: Mask, states: NDArray[np.int8], kind: Kind) -> None:
        at = np.flatnonzero(rows)
        if len(at):
            before = self.now[at]
            self.now[at, axis] = states[at]
            self._note(kind, (axis,), at, before)

    def _reduce(self) -> None:
        """One all-reduce over every axis with a sum that the target does not keep pending."""
        pending = (self.now == PENDING) & (self.target != PENDING)
        before = self.now.copy()
        self.now[pending] = REPLICATED
        for axes, at in by_axes(_masks(pending), len(self.shape)):
            self._note("all_reduce", axes, at, before[at])

    def _gather(self, first: int) -> None:
        """Gather the atoms whose outermost leaving axis is `first`, over all leaving axes."""
        atom = self.now[:, first : first + 1]
        leaving = (self.now == atom) & (atom >= 0) & ~self._kept()
        leaving &= leaving[:, first : first + 1] & ~leaving[:, :first].any(axis=1, keepdims=True)
        before = self.now.copy()
        self.now[leaving] = REPLICATED
        for axes, at in by_axes(_masks(leaving), len(self.shape)):
            self._note("all_gather", axes, at, before[at])

    def _kept(self) -> Mask:
        """Axes that already split what the target wants, with the same axes outside them."""
        kept: Mask = (self.now == self.target) & (self.now >= 0)
        for axis in range(len(self.shape)):
            atom = self.now[:, axis : axis + 1]
            outer = (self.now[:, :axis] == atom) == (self.target[:, :axis] == atom)
            kept[:, axis] &= outer.all(axis=1)
        return kept

    def _slice(self, axis: int) -> None:
        target = self.target[:, axis]
        self._move(
            axis, (self.now[:, axis] == REPLICATED) & (target != REPLICATED), target, "slice"
        )

    def _note(self, kind: Kind, axes: tuple[int, ...], at: Rows, before: Layouts) -> None:
        """Record a step; its bytes are those of the larger of the two layouts."""
        after = self.now[at]
        larger = after if kind == "all_gather" else before
        items = 0.0 if kind == "slice" else local_items(larger, self.atoms, self.shape)
        sizes = np.broadcast_to(items * float(self.item_bytes), (len(at),))
        self.steps.append(Collective(self.phase, kind, axes, at, sizes, before=before, after=after))


def _masks(flags: Mask) -> NDArray[np.int64]:
    weights = 1 << np.arange(flags.shape[1], dtype=np.int64)
    masks: NDArray[np.int64] = flags.astype(np.int64) @ weights
    return masks
