"""What runs again before backward: dropped in forward, made again when backward first asks.

An operator that runs again keeps nothing. What autograd would save of it, in order, is replaced by
empty slots, and so is what others save of its results. The first slot that backward asks for runs
the region once more, with what it was given: the same dropout, the same collectives. That fills
every slot that is still wanted, each until the backward that saved it is done.

    remade = Remade(again_0)
    remade.hold(0, x)                      what the region reads from others
    with remade.running(7):                operator 7, now and once more
        y = gelu(x)
    with promising([(remade, 0, y)]):      operator 8 runs once, its backward reads y
        z = linear(y, weight)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor

from shardfold.errors import RunError

Body = Callable[["Remade", Sequence[Tensor]], None]


class Slot:
    """Something that backward will need, and that is not kept."""

    __slots__ = ("__weakref__", "region", "value")

    def __init__(self, region: Remade) -> None:
        self.region, self.value = region, None

    region: Remade
    value: Tensor | None

    def get(self) -> Tensor:
        """The value, made again if it is not there."""
        if self.value is None:
            self.region.run()
        if self.value is None:
            raise RunError(
                "An operator that ran again for backward did not save what it saved in forward: it "
                "does not do the same twice. Plan with recompute='never'."
            )
        return self.value


def _casts() -> list[tuple[str, bool, torch.dtype]]:
    """What autocast does now, on each kind of device."""
    return [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
    ]


class Remade:
    """The slots of one region in one step, and what fills them."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.given: dict[int, Tensor] = {}
        self.slots: dict[tuple[int, int], weakref.ref[Slot]] = {}
        self.is_running = False
        self.casts = _casts()

    def hold(self, place: int, tensor: Tensor) -> None:
        """Keep what the region reads from others."""
        if torch.is_grad_enabled():
            self.given[place] = tensor.detach().requires_grad_(tensor.requires_grad)

    def running(self, op: int) -> AbstractContextManager[Any]:
        """While it lasts, an operator runs that is to run again, or does so."""
        count = 0

        def pack(tensor: Tensor) -> Slot | None:
            nonlocal count
            key, count = (op, count), count + 1
            if self.is_running:
                self._fill(key, tensor)
                return None
            return self._slot(key)

        hooks: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(
            pack, Slot.get
        )
        return hooks

    def make(self, number: int) -> Callable[[], Tensor]:
        """Promise a result to an operator that runs once."""
        return self._slot((-1, number)).get

    def fill(self, number: int, tensor: Tensor) -> None:
        """Keep such a promise."""
        self._fill((-1, number), tensor)

    def run(self) -> None:
        """Make everything again that is still wanted."""
        given = [self.given[place] for place in sorted(self.given)]
        self.given.clear()
        self.is_running = True
        try:
            with torch.enable_grad(), ExitStack() as stack:
                for device, enabled, dtype in set(self.casts) - set(_casts()):
                    stack.enter_context(torch.autocast(device, dtype, enabled))
                self.body(self, given)
        finally:
            self.is_running = False

    def _slot(self, key: tuple[int, int]) -> Slot:
        known = self.slots.get(key)
        found = None if known is None else known()
        if found is None:
            found = Slot(self)
            self.slots[key] = weakref.ref(found)
        return found

    def _fill(self, key: tuple[int, int], tensor: Tensor) -> None:
        known = self.slots.get(key)
        slot = None if known is None else known()
        if slot is not None:
            slot.value = tensor.detach()
