"""The uses of a rank's parameters: what each reader is given, and where its gradient goes.

Every use is a leaf of autograd, beside the DTensor that the user sees and on the same memory. So
nothing of DTensor runs between forward and backward, and a gradient is caught where it appears.
When backward ends, the reduced gradients of all uses are added to the parameter's `grad`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardfold.run.gathers import Gather, Gathered
from shardfold.run.gradients import Reducer, Reduction
from shardfold.run.groups import Groups
from shardfold.run.lower import Feed, Lowered
from shardfold.run.parameters import Keeping


@dataclass(frozen=True, slots=True)
class Use:
    """One operand that is a parameter with a gradient: which instruction's, and its edge."""

    number: int
    instruction: int
    operand: int
    feed: Feed


def uses_of(lowered: Lowered, parameters: Mapping[int, Any]) -> list[Use]:
    """Every use of the parameters, in the order of execution."""
    found: list[Use] = []
    for index, instruction in enumerate(lowered.instructions):
        for operand, feed in enumerate(instruction.feeds):
            if feed.tensor in parameters and feed.back is not None:
                found.append(Use(len(found), index, operand, feed))
    return found


class Uses:
    """The leaves of all uses, kept for as long as the parameters stay where they are."""

    def __init__(
        self, uses: Sequence[Use], keepings: Mapping[int, Keeping], groups: Groups
    ) -> None:
        self.uses, self.keepings = uses, keepings
        background = groups.background()
        self.gathers = {u.number: Gather(u.feed.there, background) for u in uses if u.feed.there}
        self.groups = background
        self.parameters: dict[int, Any] = {}
        self.parts: dict[int, Tensor] = {}
        self.leaves: list[Tensor] = []
        self.found: dict[int, Tensor] = {}  # gradients of this backward, by parameter
        self.reducer: Reducer | None = None

    def bind(self, parameters: Mapping[int, Any]) -> list[Tensor]:
        """The leaf of every use, for these parameters; the same ones as before where they are."""
        same = self.reducer is not None
        for tensor, parameter in parameters.items():
            part = parameter._local_tensor
            if self.parts.get(tensor) is not part or self.parameters.get(tensor) is not parameter:
                self.parts[tensor], self.parameters[tensor] = part, parameter
                same = False
        if not same:
            self._make()
        assert self.reducer is not None
        for use, leaf in zip(self.uses, self.leaves, strict=True):
            wanted = self.parameters[use.feed.tensor].requires_grad
            if leaf.requires_grad != wanted:
                leaf.requires_grad_(wanted)
        self.reducer.reset()
        self.found.clear()
        return self.leaves

    def _make(self) -> None:
        self.leaves = []
        for use in self.uses:
            part = self.parts[use.feed.tensor].detach()
            shape = self.keepings[use.feed.tensor].stored.extent.shape
            leaf = part if part.shape == shape else part.view(shape)
            leaf.requires_grad_()
            if use.number not in self.gathers:
                leaf.register_post_accumulate_grad_hook(partial(self._taken, use.number))
            self.leaves.append(leaf)
        self.reducer = Reducer(
            [self._reduction(use) for use in self.uses], self.groups, self._deliver, self._settle
        )

    def _reduction(self, use: Use) -> Reduction:
        assert use.feed.back is not None
        dtype = self.parts[use.feed.tensor].dtype
        items = torch.Size(use.feed.back.source).numel()
        return Reduction(use.number, use.feed.back, dtype, items * dtype.itemsize)

    def _taken(self, number: int, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        assert self.reducer is not None
        self.reducer.arrived(number, gradient)

    def start(self, number: int, leaf: Tensor) -> None:
        """Begin to gather the parameter of a use."""
        self.gathers[number].start_ahead(leaf)

    def gathered(self, number: int, leaf: Tensor) -> Tensor:
        """The parameter of a use as its reader needs it."""
        gather = self.gathers[number]
        if not (leaf.requires_grad and torch.is_grad_enabled()):
            return gather.collect_ahead(leaf)
        assert self.reducer is not None
        found: Tensor = Gathered.apply(leaf, gather, partial(self.reducer.arrived, number))
        return found

    def _deliver(self, number: int, gradient: Tensor) -> None:
        """Add up what comes for the uses of a parameter."""
        tensor = self.uses[number].feed.tensor
        found = self.found.get(tensor)
        self.found[tensor] = gradient if found is None else found.add_(gradient)

    def _settle(self) -> None:
        """Give every parameter its gradient, and call what the user wants called then."""
        for tensor, gradient in self.found.items():
            parameter = self.parameters[tensor]
            own = gradient.reshape(self.keepings[tensor].local)
            for hook in (parameter._backward_hooks or {}).values():
                changed = hook(self._wrapped(parameter, own))
                own = own if changed is None else changed.to_local()
            if parameter.grad is None:
                parameter.grad = self._wrapped(parameter, own)
            else:
                parameter.grad._local_tensor.add_(own)
            for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                hook(parameter)
        self.found.clear()

    def _wrapped(self, parameter: Any, own: Tensor) -> Tensor:
        found: Tensor = DTensor(own.contiguous(), parameter._spec, requires_grad=False)
        return found
