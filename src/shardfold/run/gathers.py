"""Parameters in parts, gathered for their readers: started ahead, and gathered again in backward.

While one reader computes, the parameters of the next ones are on their way, as many readers ahead
as the plan's schedule has them. A parameter that the plan gathers again for backward is not kept:
what autograd would save of it is replaced by a promise. When backward asks for one, the gathers of
as many before it are started.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from shardfold.run.groups import Groups
from shardfold.run.moves import gathered, padded, perform
from shardfold.run.operators import Context
from shardfold.run.steps import Moves

Started = tuple[Tensor, Any]  # what is being filled, and the work to wait for


class Gather:
    """The moves of a parameter from its storage to one reader."""

    def __init__(self, moves: Moves, groups: Groups) -> None:
        self.moves, self.groups = moves, groups
        self.ahead: Started | None = None
        kinds = [step.kind for step in moves.steps]
        self.can_start = kinds == ["all_gather"]

    def start(self, stored: Tensor) -> Started | None:
        """Begin, if it is the one collective that can be left to itself."""
        if not self.can_start:
            return None
        step = self.moves.steps[0]
        part = padded(stored.detach().reshape(step.before), step.leaving, max(step.gathered))
        return self.groups.start_gather(part, step.axes, len(step.gathered))

    def start_ahead(self, stored: Tensor) -> None:
        """Begin what the reader will soon ask for."""
        self.ahead = self.start(stored)

    def collect(self, stored: Tensor, started: Started | None) -> Tensor:
        """The parameter as the reader needs it."""
        if started is None:
            return perform(self.moves, stored.detach(), self.groups)
        filled, work = started
        work.wait()
        return gathered(self.moves.steps[0], filled).reshape(self.moves.target)

    def collect_ahead(self, stored: Tensor) -> Tensor:
        """The parameter, from what was begun ahead."""
        started, self.ahead = self.ahead, None
        return self.collect(stored, started)


class Gathered(torch.autograd.Function):
    """A gathered parameter; its gradient goes to `arrived`, and none to the part itself."""

    @staticmethod
    def forward(ctx: Any, stored: Tensor, gather: Gather, arrived: Callable[..., None]) -> Tensor:
        """Gather."""
        ctx.arrived = arrived
        return gather.collect_ahead(stored)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        """Hand the gradient over: it is reduced while backward goes on."""
        ctx.arrived(gradient)
        return None, None, None


class Promise:
    """A gathered parameter that is not kept: gathered again once, for all that were promised it.

    An operator of many kernels (a recurrent one) asks for it many times, one after the other.
    """

    def __init__(self, gather: Gather, stored: Tensor, context: Context) -> None:
        self.gather, self.stored = gather, stored.detach()
        self.earlier: Promise | None = None if context.traced else context.latest
        self.ahead = context.ahead
        self.made = self.kept = 0  # promises
        self.started: Started | None = None
        self.held: Tensor | None = None
        self.is_served = False  # all that were promised it have had it
        context.latest = self

    def start(self) -> None:
        """Begin to gather what backward will soon ask for, if it has not done so already."""
        if self.made and not self.is_served and self.started is None and self.held is None:
            self.started = self.gather.start(self.stored)

    def _start_earlier(self) -> None:
        earlier = self.earlier
        for _ in range(self.ahead):
            if earlier is None:
                return
            earlier.start()
            earlier = earlier.earlier

    def get(self) -> Tensor:
        """The whole parameter."""
        if self.held is None:
            started, self.started = self.started, None
            self._start_earlier()
            self.held = self.gather.collect(self.stored, started).contiguous()
        found = self.held
        self.kept += 1
        if self.kept == self.made:
            self.kept, self.held, self.is_served = 0, None, True
        return found


def promising(pairs: Sequence[tuple[Promise, Tensor]]) -> AbstractContextManager[Any]:
    """While it lasts, what autograd keeps of each tensor is kept as its promise."""
    known = {whole.untyped_storage()._cdata: promise for promise, whole in pairs}

    def pack(tensor: Tensor) -> Callable[[], Tensor]:
        promise = known.get(tensor.untyped_storage()._cdata)
        if promise is None:
            return lambda: tensor
        promise.made += 1
        shape = (tensor.size(), tensor.stride(), tensor.storage_offset())
        return lambda: promise.get().as_strided(*shape)

    hooks: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(
        pack, lambda kept: kept()
    )
    return hooks
