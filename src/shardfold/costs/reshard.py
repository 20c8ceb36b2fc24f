"""Moving tensors from one layout to another: slices and collectives, for many pairs at once.

The order keeps data small for as long as possible:

1. axes that join a split: a slice where the tensor was replicated (free), a reduce-scatter
   where it was partial, an all-to-all where another sub-dim was split; one collective for all
   axes that go the same way,
2. one all-reduce over the axes on which the value is still partial,
3. all-gathers over the axes that leave a split, outer (slow) axes first,
4. slices that only now became possible (free).

A sub-dim split by several axes is cut by the outer axis first, so an axis may join only after all
target axes outside it, and leave only together with those inside it. The moves depend on the
layouts alone, not on sizes: they are found once for all pairs of two sets of layouts, by one
state machine over arrays, and kept; sizes enter when the moves become steps with bytes.

    >>> gather = reshard(np.int8([[0]]), np.int8([[-1]]), (4,), (8,), 2, "forward")
    >>> [(s.kind, s.axes, s.bytes.tolist()) for s in gather.steps]
    [('all_gather', (0,), [16.0])]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardfold.costs.steps import Collective, Kind, Phase, Rows, Steps, by_axes
from shardfold.sharding.layouts import PENDING, REPLICATED, SHARED, Layouts, local_items

Mask = NDArray[np.bool_]
Column = NDArray[np.int8]
Codes = NDArray[np.int32] | NDArray[np.uint16]
LOWEST = SHARED
MOST_CODES = 1 << 14  # layouts that are worth counting before anyone asks
JOINED = ("all_gather", "reduce_scatter")  # as many parts as devices, all as long as the fullest


@dataclass(frozen=True, slots=True)
class Move:
    """A step of some pairs, before sizes are known: the layouts on either side of it, by number.

    A layout is a number with a digit in base `base` for each axis, the first in front. Of all pairs
    of two sets there are so many that layouts in full would fill gigabytes.
    """

    kind: Kind
    axes: tuple[int, ...]
    rows: NDArray[np.int32]
    before: Codes
    after: Codes
    base: int

    @property
    def counted(self) -> Codes:
        """The side whose fullest part says what is sent: parts that differ are padded to it."""
        return self.after if self.kind == "reduce_scatter" else self.before


def reshard(
    source: Layouts,
    target: Layouts,
    shape: Sequence[int],
    subdims: Sequence[int],
    item_bytes: int,
    phase: Phase,
) -> Steps:
    """The steps that take each row of `source` to the same row of `target`.

    `shape` are the mesh's axis sizes, `atoms` the tensor's. States are those of values or of
    gradients: REPLICATED, PENDING, or a sub-dim.
    """
    one = len(source) == 1
    found = _moves_of_one(source.tobytes(), target.tobytes()) if one else _decoded(source, target)
    steps = (_step(move, shape, subdims, item_bytes, phase, sides) for move, *sides in found)
    return Steps(len(source), tuple(steps))


@lru_cache(maxsize=4096)
def _moves_of_one(source: bytes, target: bytes) -> list[tuple[Move, Layouts, Layouts]]:
    """A single pair; a few pairs make up a plan, and many plans are looked at."""
    return _decoded(*(np.frombuffer(r, dtype=np.int8).reshape(1, -1) for r in (source, target)))


def _decoded(source: Layouts, target: Layouts) -> list[tuple[Move, Layouts, Layouts]]:
    """The moves of some pairs, each with the layouts on either side of it."""
    moves, axes = _moves(source, target), source.shape[1]
    return [(m, _layouts(m.before, m.base, axes), _layouts(m.after, m.base, axes)) for m in moves]


def reshard_all(
    sources: Layouts,
    targets: Layouts,
    shape: Sequence[int],
    subdims: Sequence[int],
    item_bytes: int,
    phase: Phase,
) -> Steps:
    """The steps of every pair of a source and a target, sources varying slowest; no layouts."""
    key = (sources.shape, sources.tobytes(), targets.shape, targets.tobytes())
    return Steps(
        len(sources) * len(targets),
        tuple(_step(move, shape, subdims, item_bytes, phase) for move in _moves_of_pairs(*key)),
    )


@lru_cache(maxsize=512)
def _moves_of_pairs(
    source_shape: tuple[int, int], sources: bytes, target_shape: tuple[int, int], targets: bytes
) -> tuple[Move, ...]:
    left = np.frombuffer(sources, dtype=np.int8).reshape(source_shape)
    right = np.frombuffer(targets, dtype=np.int8).reshape(target_shape)
    return _moves(np.repeat(left, len(right), axis=0), np.tile(right, (len(left), 1)))


def _moves(source: Layouts, target: Layouts) -> tuple[Move, ...]:
    axes = source.shape[1]
    base = int(max(source.max(initial=0), target.max(initial=0))) + 1 - LOWEST
    machine = _Machine(
        [source[:, a].copy() for a in range(axes)],
        [target[:, a].copy() for a in range(axes)],
        base,
    )
    machine.run()
    return tuple(machine.moves)


def _step(
    move: Move,
    shape: Sequence[int],
    subdims: Sequence[int],
    item_bytes: int,
    phase: Phase,
    sides: Sequence[Layouts | None] = (None, None),
) -> Collective:
    sizes = np.zeros(len(move.rows))
    if move.kind != "slice":
        parts = math.prod(shape[a] for a in move.axes) if move.kind in JOINED else 1
        sizes = _items(move, tuple(subdims), tuple(shape)) * (item_bytes * parts)
    rows, (before, after) = move.rows.astype(np.intp), sides
    return Collective(phase, move.kind, move.axes, rows, sizes, before=before, after=after)


def _items(move: Move, subdims: tuple[int, ...], shape: tuple[int, ...]) -> NDArray[np.float64]:
    """As `local_items`, by look-up: where layouts are many, all that there can be are counted."""
    base, codes = move.base, move.counted
    if len(codes) < base ** len(shape) > MOST_CODES or len(codes) == 1:
        return local_items(_layouts(codes, base, len(shape)), subdims, shape)
    return _items_by_code(base, subdims, shape).take(codes)


@lru_cache(maxsize=256)
def _items_by_code(
    base: int, subdims: tuple[int, ...], shape: tuple[int, ...]
) -> NDArray[np.float64]:
    every = np.arange(base ** len(shape), dtype=np.int32)
    return local_items(_layouts(every, base, len(shape)), subdims, shape)


def _layouts(codes: Codes, base: int, axes: int) -> Layouts:
    """The layouts of some numbers."""
    found = np.empty((len(codes), axes), dtype=np.int8)
    left = codes.astype(np.int32)
    for axis in reversed(range(axes)):
        left, found[:, axis] = np.divmod(left, base)
    found += LOWEST
    return found


@dataclass(slots=True)
class _Machine:
    """All rows at once: `now` moves towards `target`, a column an axis; every move is noted."""

    now: list[Column]
    target: list[Column]
    base: int
    moves: list[Move] = field(default_factory=list)
    weights: list[np.int32] = field(init=False)  # of the digits
    code: NDArray[np.int32] = field(init=False)  # of where each row is now

    def __post_init__(self) -> None:
        axes = len(self.now)
        self.weights = [np.int32(self.base ** (axes - 1 - axis)) for axis in range(axes)]
        pairs = zip(self.now, self.weights, strict=True)
        self.code = np.sum([(now - np.int32(LOWEST)) * weight for now, weight in pairs], axis=0)

    def run(self) -> None:
        axes = range(len(self.now))
        for _ in axes:
            for axis in axes:
                self._move(axis, self._may_join(axis) & (self.now[axis] == REPLICATED), "slice")
            for axis in reversed(axes):
                self._scatter(axis)
            for axis in axes:
                self._swap(axis)
        self._reduce()
        for axis in axes:
            self._gather(axis)
        for axis in axes:
            lacking = (self.now[axis] == REPLICATED) & (self.target[axis] != REPLICATED)
            self._move(axis, lacking, "slice")

    def _scatter(self, first: int) -> None:
        """One reduce-scatter over `first` and the axes inside it that join the same sub-dim."""
        going = self._may_join(first) & (self.now[first] == PENDING)
        if not going.any():
            return
        atom = self.target[first]
        flags = [np.zeros_like(going) for _ in self.now]
        flags[first] = going
        for axis in range(first + 1, len(self.now)):
            wanted, pending = self.target[axis] == atom, self.now[axis] == PENDING
            flags[axis] = going & wanted & pending
            going = going & ~(wanted & ~pending)  # beyond an axis that joins otherwise, wait
        self._together("reduce_scatter", flags, self.target)

    def _swap(self, first: int) -> None:
        """One all-to-all over `first` and all axes inside it in the sub-dim that they leave.

        They must all join the same sub-dim, with no axis between them that joins it otherwise.
        """
        leaves, joins = self.now[first].copy(), self.target[first]
        going = self._may_join(first) & (leaves >= 0)
        if not going.any():
            return
        flags = [np.zeros_like(going) for _ in self.now]
        flags[first] = going
        interrupted = np.zeros_like(going)
        for axis in range(first + 1, len(self.now)):
            flags[axis] = going & (self.now[axis] == leaves)
            joining = self.target[axis] == joins
            going = going & ~(flags[axis] & (~joining | interrupted))
            interrupted |= joining & ~flags[axis]
        self._together("all_to_all", [mask & going for mask in flags], self.target)

    def _may_join(self, axis: int) -> Mask:
        """The target splits a sub-dim here that is now split by just the target's outer axes."""
        atom = self.target[axis]
        ready: Mask = (atom >= 0) & (self.now[axis] != atom)
        for other, now in enumerate(self.now):
            if other < axis:
                ready &= (now == atom) == (self.target[other] == atom)
            elif other > axis:
                ready &= now != atom
        return ready

    def _move(self, axis: int, rows: Mask, kind: Kind) -> None:
        at = np.flatnonzero(rows)
        if len(at):
            self._note(kind, (axis,), at, self.target)

    def _reduce(self) -> None:
        """One all-reduce over every axis with a sum that the target does not keep pending."""
        pairs = zip(self.now, self.target, strict=True)
        flags = [(now == PENDING) & (to != PENDING) for now, to in pairs]
        self._together("all_reduce", flags, self._whole())

    def _gather(self, first: int) -> None:
        """Gather the sub-dims whose outermost leaving axis is `first`, over all leaving axes."""
        atom = self.now[first]
        leaving = [(now == atom) & (atom >= 0) & ~self._kept(a) for a, now in enumerate(self.now)]
        starts = leaving[first]
        for outer in leaving[:first]:
            starts = starts & ~outer
        self._together("all_gather", [mask & starts for mask in leaving], self._whole())

    def _kept(self, axis: int) -> Mask:
        """The axis already splits what the target wants, with the same axes outside it."""
        atom = self.now[axis]
        kept: Mask = (atom == self.target[axis]) & (atom >= 0)
        for now, target in zip(self.now[:axis], self.target[:axis], strict=True):
            kept &= (now == atom) == (target == atom)
        return kept

    def _whole(self) -> list[Column]:
        return [np.full_like(now, REPLICATED) for now in self.now]

    def _together(self, kind: Kind, flags: list[Mask], states: list[Column]) -> None:
        """One collective over the flagged axes of each row, which take the given states."""
        if not any(mask.any() for mask in flags):
            return
        masks = np.zeros(len(flags[0]), dtype=np.int64)
        for axis, mask in enumerate(flags):
            masks |= mask.astype(np.int64) << axis
        for axes, at in by_axes(masks, len(flags)):
            self._note(kind, axes, at, states)

    def _note(self, kind: Kind, axes: tuple[int, ...], at: Rows, states: list[Column]) -> None:
        """Let some rows take the given states on some axes, and note it."""
        before = self.code[at]
        after = before.copy()
        for axis in axes:
            new = states[axis][at]
            after += (new - self.now[axis][at]) * self.weights[axis]
            self.now[axis][at] = new
        self.code[at] = after
        sides = self._short(before), self._short(after)
        self.moves.append(Move(kind, axes, at.astype(np.int32), *sides, self.base))

    def _short(self, codes: NDArray[np.int32]) -> Codes:
        return codes.astype(np.uint16) if self.base ** len(self.now) <= 1 << 16 else codes
