"""Bucketed reduction of gradients: which of them share a collective, and which members it had.

Gradients of parameters: reduced in buckets while backward goes on, and awaited at its end.

Every use of a parameter has its own reduction in the plan, or a share in one of a sum. Uses whose
reductions are of one kind, on the same axes and in one dtype share a collective, until the bucket
is full; a gradient that fills one alone is reduced where it is, without a copy. Buckets are fixed
beforehand, in the reverse order of the uses, and start in that order on every device: one is
started when all its gradients have come and those before it have started.

In a step of several passes, what is to be all-reduced is added up first, and reduced in the last
pass; so is what is not sent at all. What is scattered is reduced in every pass, and handed over
while backward goes on, so that only sums are kept.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardfold.costs.steps import BUCKET_BYTES
from shardfold.runtime.process_groups import Axes, Groups
from shardfold.runtime.reshard import Casting, Moves, Woven, perform, scattered, stacked

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Launched:
    """A collective that stands for several of the plan's: the axes and bytes of each."""

    kind: str
    axes: Axes
    members: tuple[tuple[Axes, int], ...]
    bytes: int


def shared_out(
    items: Iterable[T],
    key: Callable[[T], Hashable | None],
    size: Callable[[T], int],
    limit: int,
) -> Iterator[list[T]]:
    """Cut items into buckets of one key, each closed when it holds `limit` bytes.

    What has no key, or fills a bucket alone, is by itself.

    >>> list(shared_out(["a", "bb", "cccc", "d"], lambda s: 0, len, 3))
    [['a', 'bb'], ['cccc'], ['d']]
    """
    open_ones: dict[Hashable, list[T]] = {}
    for item in items:
        kind = key(item)
        if kind is None or size(item) >= limit:
            yield [item]
            continue
        bucket = open_ones.setdefault(kind, [])
        bucket.append(item)
        if sum(map(size, bucket)) >= limit:
            yield open_ones.pop(kind)
    yield from open_ones.values()


JOINED = ("all_reduce", "reduce_scatter")
LAG = 2  # buckets that may be under way in one of several passes before the oldest is awaited

Deliver = Callable[[int, Tensor], None]  # the number of a use, and its gradient as it is stored
Finished = Callable[[], Tensor]  # what a bucket holds for a use, once its work is done


@dataclass(frozen=True, slots=True)
class Reduction:
    """What is to be done with the gradient of one use."""

    number: int
    moves: Moves
    dtype: torch.dtype
    gradient_bytes: int
    woven: Woven | None = None  # of even parts that are scattered at once
    cast: Casting | None = None  # of a parameter that is kept in another dtype

    @property
    def waits(self) -> bool:
        """Whether it is added up over the passes of a step before anything is done with it."""
        return not self.moves or self.moves.is_deferred

    @property
    def key(self) -> tuple[Any, ...] | None:
        """Reductions with the same key may share a collective; None: not with any."""
        step = self.moves.steps[0]
        if self.woven is not None:
            return (step.kind, self.woven.axes, self.dtype)
        if len(self.moves.steps) != 1 or step.kind not in JOINED:
            return None
        return (step.kind, step.axes, self.dtype)

    def stacked(self, gradient: Tensor) -> Tensor:
        """What a reduce-scatter takes of it: everyone's part along a new first dim."""
        if self.woven is not None:
            return self.woven.parts(gradient)
        step = self.moves.steps[0]
        return stacked(step, gradient.reshape(step.before))

    def own_part(self, mine: Tensor) -> Tensor:
        """What is stored, from what a reduce-scatter returned."""
        found = mine if self.woven is not None else scattered(self.moves.steps[0], mine)
        return found.reshape(self.moves.target)

    def by_steps(self, sent: int) -> Iterator[tuple[Axes, int]]:
        """The collectives of the plan for which one of so many bytes stands."""
        steps = self.moves.steps
        if len(steps) == 1:
            yield steps[0].axes, sent
            return
        for step in steps:
            yield step.axes, sent * math.prod(step.before) // math.prod(steps[0].before)


@dataclass(slots=True)
class Bucket:
    """Reductions that share a collective, and how far it has come in this backward."""

    members: list[Reduction]
    gradients: dict[int, Tensor] = field(default_factory=dict)
    work: Any = None
    results: list[tuple[int, Finished]] = field(default_factory=list)
    is_started: bool = False

    @property
    def is_full(self) -> bool:
        """Whether all gradients have come."""
        return len(self.gradients) == len(self.members)

    def clear(self) -> None:
        """Forget this backward."""
        self.gradients, self.work, self.results, self.is_started = {}, None, [], False


class Reducer:
    """Takes gradients as backward finds them, and delivers them reduced when it ends."""

    def __init__(
        self,
        reductions: Sequence[Reduction],
        groups: Groups,
        deliver: Deliver,
        settle: Callable[[], None],
        limit: int = BUCKET_BYTES,
        rest: Callable[[], None] = lambda: None,
    ) -> None:
        self.groups, self.deliver, self.settle, self.rest = groups, deliver, settle, rest
        self.waiting = {r.number for r in reductions if r.waits}
        self.casts = {r.number: r.cast for r in reductions if r.cast is not None}
        self.sums: dict[int, Tensor] = {}  # of what waits, over the passes so far
        self.under_way: deque[Bucket] = deque()
        self.is_first = self.is_last = True
        sent = [r for r in reductions if r.moves]
        self.buckets = list(buckets_of(sent, limit))
        self.bucket_of = {m.number: b for b in self.buckets for m in b.members}
        self.launched: list[Launched] = []
        self.reset()

    def begin(self, number: int, passes: int) -> None:
        """Be ready for the backward of one of the passes of a step."""
        self.is_first, self.is_last = number == 0, number == passes - 1
        self.reset()
        if self.is_first:
            self.sums.clear()

    def reset(self) -> None:
        """Be ready for a backward, whatever became of the last one."""
        for bucket in self.buckets:
            bucket.clear()
        self.under_way.clear()
        self.next = 0
        self.is_active = False
        self.ready: list[tuple[int, Tensor]] = []
        self.late: list[tuple[int, Tensor]] = []

    def activate(self) -> None:
        """A gradient has come, here or to whoever adds several up: see to the end of backward."""
        if not self.is_active:
            self.is_active = True
            if self.is_first:
                self.launched.clear()
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def arrived(self, number: int, gradient: Tensor) -> None:
        """Take the gradient of a use."""
        self.activate()
        if number in self.waiting and not (self.is_first and self.is_last):
            self._add(number, gradient)
            if self.is_last:
                self._send(number, self._summed(number))
            return
        self._send(number, gradient)

    def _add(self, number: int, gradient: Tensor) -> None:
        if number in self.sums:
            self.sums[number].add_(gradient)
        else:
            cast = self.casts.get(number)
            self.sums[number] = owned(gradient if cast is None else cast.to_keep(gradient))

    def _summed(self, number: int) -> Tensor:
        """What the passes of a step have added up, as it is sent."""
        found, cast = self.sums.pop(number), self.casts.get(number)
        return found if cast is None else cast.to_send(found)

    def _send(self, number: int, gradient: Tensor) -> None:
        bucket = self.bucket_of.get(number)
        if bucket is None:
            self.ready.append((number, gradient))
            return
        if number in bucket.gradients or bucket.is_started:
            self.late.append((number, gradient))  # of a second forward in the same backward
            return
        bucket.gradients[number] = gradient
        while self.next < len(self.buckets):
            upcoming = self.buckets[self.next]
            if upcoming.is_full:
                self._start(upcoming)
            elif not self._rests(upcoming):
                break
            self.next += 1

    def _rests(self, bucket: Bucket) -> bool:
        """Whether a bucket has nothing to do in this pass; its members are all of one kind."""
        return not self.is_last and bucket.members[0].number in self.waiting

    @torch.no_grad()
    def finish(self) -> None:
        """Start what is left, wait for everything, and deliver."""
        self.rest()
        for number in list(self.sums) if self.is_last else ():  # without a part in this pass
            self._send(number, self._summed(number))
        for bucket in self.buckets[self.next :]:
            self._start(bucket)
        late = [self._bucket_for(number, g) for number, g in self.late]
        for bucket in late:
            self._start(bucket)
        for number, gradient in self.ready:
            self.deliver(number, owned(gradient))
        for bucket in (*self.buckets, *late):
            self._end(bucket)
        self.reset()
        if self.is_last:
            self.settle()

    def _end(self, bucket: Bucket) -> None:
        """Wait for a bucket, and deliver what it holds."""
        if bucket.work is not None:
            bucket.work.wait()
        for number, finished in bucket.results:
            self.deliver(number, finished())
        bucket.work, bucket.results = None, []

    def _bucket_for(self, number: int, gradient: Tensor) -> Bucket:
        member = next(m for m in self.bucket_of[number].members if m.number == number)
        return Bucket([member], {number: gradient})

    @torch.no_grad()
    def _start(self, bucket: Bucket) -> None:
        bucket.is_started = True
        present = [m for m in bucket.members if m.number in bucket.gradients]
        if not present:
            return
        taken = [bucket.gradients[m.number] for m in present]
        bucket.gradients = {}
        if present[0].key is None:
            (member,), (gradient,) = present, taken
            result = perform(member.moves, gradient, self.groups, owned=is_free(gradient))
            bucket.results = [(member.number, partial(owned, result))]
            self._follow(bucket)
            return
        kind, axes, _ = present[0].key
        start = self._reduce if kind == "all_reduce" else self._scatter
        sizes = start(bucket, present, taken, axes)
        if len(present) > 1 or len(present[0].moves.steps) > 1:
            members = (m.by_steps(size) for m, size in zip(present, sizes, strict=True))
            told = Launched(kind, axes, tuple(chain.from_iterable(members)), sum(sizes))
            self.launched.append(told)
        self._follow(bucket)

    def _follow(self, bucket: Bucket) -> None:
        """In one of several passes, deliver what was started some buckets ago."""
        if self.is_first and self.is_last:
            return
        self.under_way.append(bucket)
        while len(self.under_way) > LAG:
            self._end(self.under_way.popleft())

    def _reduce(
        self, bucket: Bucket, members: list[Reduction], taken: list[Tensor], axes: Axes
    ) -> tuple[int, ...]:
        if len(taken) == 1:
            whole = owned(taken[0])
            pieces = [whole]
        else:
            whole = torch.cat([g.reshape(-1) for g in taken])
            pieces = list(whole.split([g.numel() for g in taken]))
        bucket.work = self.groups.start_reduce(whole, axes)
        bucket.results = [
            (m.number, partial(piece.view, m.moves.target))
            for m, piece in zip(members, pieces, strict=True)
        ]
        return tuple(_bytes(piece) for piece in pieces)

    def _scatter(
        self, bucket: Bucket, members: list[Reduction], taken: list[Tensor], axes: Axes
    ) -> tuple[int, ...]:
        """The rows of each member's stack lie beside each other in the bucket's rows."""
        stacks = [m.stacked(g) for m, g in zip(members, taken, strict=True)]
        shapes = [stack.shape[1:] for stack in stacks]
        whole = stacks[0]
        if len(stacks) > 1:
            whole = torch.cat([stack.flatten(1) for stack in stacks], 1)
        mine, bucket.work = self.groups.start_scatter(whole, axes)
        rows = mine.view(-1).split([shape.numel() for shape in shapes])
        bucket.results = [
            (m.number, partial(m.own_part, row.view(shape)))
            for m, row, shape in zip(members, rows, shapes, strict=True)
        ]
        return tuple(_bytes(stack) for stack in stacks)


def _bytes(tensor: Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def buckets_of(reductions: Sequence[Reduction], limit: int) -> Iterator[Bucket]:
    """Cut the uses into buckets, those that backward meets first in front."""
    found = shared_out(reversed(reductions), lambda r: r.key, lambda r: r.gradient_bytes, limit)
    return map(Bucket, found)


def owned(gradient: Tensor) -> Tensor:
    """The gradient in memory of its own: autograd hands one tensor to all terms of a sum."""
    if gradient.is_contiguous() and is_free(gradient):
        return gradient
    return gradient.clone(memory_format=torch.contiguous_format)


def is_free(gradient: Tensor) -> bool:
    """Whether a gradient's memory is its own, so that it may be written to.

    Tensors that share memory are told apart by what holds it; the very same tensor in two hands is
    not, so that what comes from autograd as it is must be copied first (`uses`).
    """
    storage = gradient.untyped_storage()
    holders: int = torch._C._storage_Use_Count(storage._cdata)
    # One for the tensor, one for the storage asked for here.
    return holders <= 2 and storage.nbytes() == _bytes(gradient)
