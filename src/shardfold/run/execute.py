"""Runs one device's instructions: move the operands, call, keep the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardfold.run.lower import Feed, Instruction, Lowered
from shardfold.run.moves import Reshard, perform, write_back
from shardfold.run.operators import Context

Observer = Callable[[Instruction, list[Tensor]], list[Tensor]]


def execute(
    lowered: Lowered,
    given: Mapping[int, Tensor],
    loss: int,
    context: Context,
    observe: Observer | None = None,
) -> Tensor:
    """The loss, from the local parts of the parameters and the whole of everything else."""
    values = dict(given)
    for instruction in lowered.instructions:
        operands = [_moved(feed, values[feed.tensor], context) for feed in instruction.feeds]
        results = _call(instruction, operands, values, context)
        if observe is not None:
            results = observe(instruction, results)
        for tensor, result, kept in zip(
            instruction.results, results, instruction.kept, strict=True
        ):
            values[tensor] = result if kept is None else _moved(kept, result, context)
        for tensor in instruction.drops:
            del values[tensor]
    return values[loss]


def _moved(feed: Feed, value: Tensor, context: Context) -> Tensor:
    if not feed.moves:
        return value
    if feed.back is None or not value.requires_grad:
        with torch.no_grad():
            return perform(feed.there, value, context.groups)
    moved: Tensor = Reshard.apply(value, feed.there, feed.back, context.groups)
    return moved


def _call(
    instruction: Instruction,
    operands: Sequence[Tensor],
    values: Mapping[int, Tensor],
    context: Context,
) -> list[Tensor]:
    flows = instruction.has_gradient and torch.is_grad_enabled()
    with torch.set_grad_enabled(flows), _regathering(instruction, operands, values, context):
        found = instruction.local(operands, context)
    for k in instruction.writes:
        feed = instruction.feeds[k]
        write_back(feed.there, operands[k], values[feed.tensor])
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]


def _regathering(
    instruction: Instruction,
    operands: Sequence[Tensor],
    values: Mapping[int, Tensor],
    context: Context,
) -> AbstractContextManager[Any]:
    """While the operator runs, what it keeps of a gathered parameter is kept as a promise.

    Autograd asks for it back in backward; only then is the parameter gathered again.
    """
    promised = [
        (operand.untyped_storage().data_ptr(), _Promise(feed, values[feed.tensor], context))
        for feed, operand in zip(instruction.feeds, operands, strict=True)
        if feed.regathers
    ]
    if not promised:
        return nullcontext()

    def pack(tensor: Tensor) -> Any:
        for pointer, promise in promised:
            if tensor.untyped_storage().data_ptr() == pointer:
                shape = (tensor.size(), tensor.stride(), tensor.storage_offset())
                promise.made += 1
                return lambda: promise.get().as_strided(*shape)
        return lambda: tensor

    hooks: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(
        pack, lambda promise: promise()
    )
    return hooks


class _Promise:
    """A gathered parameter that is not kept: gathered again once, for all that were promised it.

    An operator of many kernels (a recurrent one) asks for it many times, one after the other.
    """

    def __init__(self, feed: Feed, stored: Tensor, context: Context) -> None:
        self.feed, self.stored, self.context = feed, stored.detach(), context
        self.made = self.kept = 0  # promises
        self.held: Tensor | None = None

    def get(self) -> Tensor:
        if self.held is None:
            self.held = perform(self.feed.there, self.stored, self.context.groups).contiguous()
        found = self.held
        self.kept += 1
        if self.kept == self.made:
            self.kept, self.held = 0, None
        return found
