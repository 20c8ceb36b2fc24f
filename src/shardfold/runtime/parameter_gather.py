"""All-gather of sharded parameters: prefetched in forward, and gathered again for backward.

While one reader computes, the parameters of the next ones are on their way, as many readers ahead
as the plan's schedule has them. Small parameters share a collective, which starts when the first of
them would. One that lies in parts of several dims, over links of one level, is gathered at once,
and put together here.

A parameter that the plan gathers again for backward is not kept: what autograd would save of it is
replaced by a promise. When backward asks for one, the gathers of as many before it are started.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from shardfold.costs.steps import BUCKET_BYTES
from shardfold.runtime.gradient_reducer import Launched, shared_out
from shardfold.runtime.ops import Context
from shardfold.runtime.process_groups import Axes, Groups
from shardfold.runtime.reshard import Casting, Moves, Woven, gathered, padded, perform


class Gather:
    """The moves of a parameter from its storage to one reader; one collective if they can be.

    Without the levels of the mesh's axes they are taken one by one, when they are asked for.
    """

    def __init__(
        self,
        moves: Moves,
        groups: Groups,
        levels: Sequence[int] = (),
        cast: Casting | None = None,
    ) -> None:
        self.moves, self.groups, self.cast = moves, groups, cast
        axes = moves.at_once("all_gather", levels) if levels else None
        self.can_start = axes is not None
        if axes is not None:
            self.axes = axes
            self.members = math.prod(len(step.gathered) for step in moves.steps)
            self.woven = Woven.of(moves, axes, groups.place) if moves.is_even else None

    def used(self, stored: Tensor) -> Tensor:
        """The part of this device, in the dtype in which the parameter is used."""
        part = stored.detach()
        return part if self.cast is None else self.cast.to_use(part)

    def packed(self, stored: Tensor) -> Tensor:
        """What is sent: this device's part, flat."""
        part = self.used(stored)
        if self.woven is None:
            step = self.moves.steps[0]
            part = padded(part.reshape(step.before), step.leaving, max(step.gathered))
        return part.reshape(-1)

    def unpacked(self, rows: Tensor) -> Tensor:
        """The parameter, from everyone's parts."""
        if self.woven is not None:
            whole = self.woven.whole(rows)
        else:
            step = self.moves.steps[0]
            shape = list(step.before)
            shape[step.leaving] = max(step.gathered)
            whole = gathered(step, rows.reshape(self.members, *shape))
        return whole.reshape(self.moves.target).contiguous()

    def by_steps(self, item_bytes: int, part_items: int) -> Iterator[tuple[Axes, int]]:
        """The collectives of the plan that it stands for, with their bytes."""
        if len(self.moves.steps) == 1:
            yield self.axes, self.members * part_items * item_bytes
            return
        for step in self.moves.steps:
            yield step.axes, math.prod(step.after) * item_bytes


@dataclass(frozen=True, slots=True)
class Member:
    """A use of a parameter that may share a collective: its gather, and this device's part."""

    number: int
    gather: Gather
    part: Tensor
    stretch: int  # what runs again together is by itself

    @property
    def key(self) -> tuple[Any, ...] | None:
        """Members with the same key may share a collective; None: not with any."""
        if not self.gather.can_start:
            return None
        return (self.gather.axes, self._dtype, self.stretch)

    @property
    def bytes(self) -> int:
        """Of the whole parameter, as it is gathered."""
        return int(self.gather.members * self.part.numel() * self._dtype.itemsize)

    @property
    def _dtype(self) -> torch.dtype:
        cast = self.gather.cast
        return self.part.dtype if cast is None or self.part.dtype != cast.kept else cast.used


@dataclass(slots=True)
class Coming:
    """A collective under way: what it brings to each of those that share it."""

    work: Any
    rows: dict[int, Tensor]

    def take(self, number: int) -> Tensor | None:
        """Everyone's parts for one of them, once."""
        rows = self.rows.pop(number, None)
        if rows is not None and self.work is not None:
            self.work.wait()
            self.work = None
        return rows


class Joint:
    """Gathers that share a collective."""

    def __init__(self, members: Sequence[Member], launched: list[Launched] | None = None) -> None:
        self.members = {member.number: member for member in members}
        self.first = members[0].number
        self.launched = launched
        self.coming: Coming | None = None  # in forward
        self.views = {m.number: view for m in members if (view := _view(m)) is not None}

    def start(self, numbers: Sequence[int]) -> Coming | None:
        """Begin with some of them, if it is a collective that can be left to itself."""
        some = [self.members[number] for number in numbers]
        gather = some[0].gather
        if not gather.can_start:
            return None
        parts = [self._packed(member) for member in some]
        sizes = [part.numel() for part in parts]
        sent = parts[0] if len(parts) == 1 else torch.cat(parts)
        filled, work = gather.groups.start_gather(sent, gather.axes, gather.members)
        if self.launched is not None and (len(some) > 1 or len(gather.moves.steps) > 1):
            self.launched.append(_told(some, sizes, filled))
        return Coming(work, dict(zip(numbers, filled.split(sizes, 1), strict=True)))

    def _packed(self, member: Member) -> Tensor:
        view = self.views.get(member.number)
        return member.gather.packed(member.part) if view is None else view

    def start_ahead(self) -> None:
        """Begin what readers will soon ask for."""
        self.coming = self.start(tuple(self.members))

    def collect(self, number: int, coming: Coming | None) -> Tensor:
        """A parameter as its reader needs it."""
        member = self.members[number]
        rows = None if coming is None else coming.take(number)
        if rows is None:
            used = member.gather.used(member.part)
            return perform(member.gather.moves, used, member.gather.groups)
        return member.gather.unpacked(rows)

    def collect_ahead(self, number: int) -> Tensor:
        """The parameter, from what was begun ahead."""
        return self.collect(number, self.coming)


def _view(member: Member) -> Tensor | None:
    """What a member sends, if that is its own memory: the same in every step."""
    if not member.gather.can_start:
        return None
    packed = member.gather.packed(member.part)
    is_own = packed.untyped_storage()._cdata == member.part.untyped_storage()._cdata
    return packed if is_own else None


def _told(members: Sequence[Member], sizes: Sequence[int], filled: Tensor) -> Launched:
    item = filled.element_size()
    found = (
        step
        for member, size in zip(members, sizes, strict=True)
        for step in member.gather.by_steps(item, size)
    )
    axes = members[0].gather.axes
    return Launched("all_gather", axes, tuple(found), filled.numel() * item)


def joints_of(members: Sequence[Member], launched: list[Launched]) -> Iterator[Joint]:
    """Cut gathers, in the order of their readers, into those that share a collective."""
    for found in shared_out(members, lambda m: m.key, lambda m: m.bytes, BUCKET_BYTES):
        yield Joint(found, launched)


class Gathered(torch.autograd.Function):
    """A gathered parameter; its gradient goes to `arrived`, and none to the part itself."""

    @staticmethod
    def forward(
        ctx: Any, stored: Tensor, take: Callable[[], Tensor], arrived: Callable[[Tensor], None]
    ) -> Tensor:
        """Gather."""
        ctx.arrived = arrived
        return take()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        """Hand the gradient over: it is reduced while backward goes on."""
        ctx.arrived(gradient)
        return None, None, None


class Promise:
    """Gathered parameters that are not kept: gathered again once, for all that were promised them.

    An operator of many kernels (a recurrent one) asks for one many times, one after the other.
    """

    def __init__(self, joint: Joint, context: Context) -> None:
        self.joint = joint
        self.earlier: Promise | None = None if context.traced else context.latest
        self.ahead = context.ahead
        self.made: dict[int, int] = {}  # promises of each parameter that have not been kept yet
        self.held: dict[int, Tensor] = {}
        self.coming: Coming | None = None
        self.is_begun = False
        context.latest = self

    def make(self, number: int) -> Callable[[], Tensor]:
        """Promise a parameter once more."""
        self.made[number] = self.made.get(number, 0) + 1
        return partial(self.get, number)

    def start(self) -> None:
        """Begin to gather what backward will soon ask for, if it has not done so already."""
        if self.made and not self.is_begun:
            self.is_begun = True
            self.coming = self.joint.start(tuple(self.made))

    def _start_earlier(self) -> None:
        earlier = self.earlier
        for _ in range(self.ahead):
            if earlier is None:
                return
            earlier.start()
            earlier = earlier.earlier

    def get(self, number: int) -> Tensor:
        """The whole parameter."""
        if number not in self.held:
            self.start()
            self._start_earlier()
            self.held[number] = self.joint.collect(number, self.coming).contiguous()
        self.made[number] -= 1
        return self.held[number] if self.made[number] > 0 else self.held.pop(number)


class Promising(Protocol):
    """What makes promises of tensors, each of which has a number."""

    def make(self, number: int) -> Callable[[], Tensor]:
        """Promise a tensor; what is called when it is needed."""


def promising(given: Sequence[tuple[Promising, int, Tensor]]) -> AbstractContextManager[Any]:
    """While it lasts, what autograd keeps of each tensor is kept as its promise."""
    known = {whole.untyped_storage()._cdata: (promise, number) for promise, number, whole in given}

    def pack(tensor: Tensor) -> Callable[[], Tensor]:
        found = known.get(tensor.untyped_storage()._cdata)
        if found is None:
            return lambda: tensor
        promise, number = found
        get = promise.make(number)
        shape = (tensor.size(), tensor.stride(), tensor.storage_offset())
        return lambda: get().as_strided(*shape)

    hooks: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(
        pack, lambda kept: kept()
    )
    return hooks
