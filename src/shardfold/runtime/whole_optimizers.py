"""Optimizers that need full parameters (Adafactor, Muon, LBFGS), on sharded parameters.

An optimizer that works element by element steps on each rank's parts. One that takes norms, means
of rows or products of matrices would need collectives inside its step, and some of torch's go wrong
on DTensors without a word. So for all but the former, a step is made on whole tensors: parameters
and gradients are gathered, every rank makes the same step, and keeps its part of what it finds:

    gathered -> torch's own step, with torch's own state, on plain tensors -> sliced

The state is then whole on every rank. Nothing in a user's loop changes: torch calls us before and
after every step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial, wraps
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from shardfold.runtime.parameters import Keeping

# Work element by element, and are right on DTensors. Everything else is given whole tensors.
ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD"}
)
OF_A_STEP = ("step", "mu_product", "eta", "mu")  # numbers that torch's optimizers count by
FUSED = frozenset({"Adam", "AdamW"})  # of those, whose fused kernel knows DTensors

STEP = Optimizer.profile_hook_step(lambda: None).__code__  # of torch, around every step

_KEEPINGS: Any = WeakTensorKeyDictionary()  # of the parameters of parallel modules
_GATHERED: Any = WeakTensorKeyDictionary()  # whole: its gradient as it was gathered, its version
_SWAPPED: WeakKeyDictionary[Any, dict[Tensor, Tensor]] = WeakKeyDictionary()  # whole: in parts
_WHOLE: WeakKeyDictionary[Any, dict[Tensor, Tensor]] = WeakKeyDictionary()  # in parts: whole


def known(parameter: Tensor, keeping: Keeping) -> None:
    """Take note of a parameter of a parallel module."""
    _watch_steps()
    _KEEPINGS[parameter] = keeping


@cache
def _watch_steps() -> None:
    """Be called before and after every step, once there is a parallel module."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def sees_whole(optimizer: Any) -> bool:
    """Whether an optimizer's step is made on whole tensors.

    One around another is not: what it does itself is done to parts as in any training loop.
    """
    if any(isinstance(each, Optimizer) for each in vars(optimizer).values()):
        return False
    kind = type(optimizer)
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    known = FUSED if is_fused else ELEMENTWISE
    return not (kind.__module__.startswith("torch.") and kind.__name__ in known)


def _members(optimizer: Any) -> Iterator[tuple[list[Tensor], int, Tensor]]:
    """Where an optimizer holds parameters."""
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            yield group["params"], place, parameter


def _before(optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Put whole tensors in place of those in parts."""
    if not sees_whole(optimizer):
        _take_state(optimizer)
        return None
    if _is_inner(optimizer):
        return None
    _put_back(optimizer)  # where an error ended the last step
    wholes = _WHOLE.setdefault(optimizer, {})
    swapped: dict[Tensor, Tensor] = {}
    for _, _, part in _members(optimizer):
        if isinstance(part, DTensor) and part in _KEEPINGS:
            empty = torch.empty(0, device=part.device, dtype=part.dtype)
            swapped[wholes.setdefault(part, empty)] = part
    if not swapped:
        return None
    _SWAPPED[optimizer] = swapped
    parts = {part: whole for whole, part in swapped.items()}
    _gather(swapped)
    _place(optimizer, parts)
    _move_state(optimizer, parts)
    _complete_state(optimizer, swapped)
    its, *rest = args
    closure = rest[0] if rest else kwargs.get("closure")
    if closure is None:
        return None
    around = _around(optimizer, closure, swapped)
    return ((its, around, *rest[1:]), kwargs) if rest else (args, {**kwargs, "closure": around})


def _is_inner(optimizer: Any) -> bool:
    """Whether a step is a part of another one of the same optimizer (`super().step()`)."""
    frame: FrameType | None = sys._getframe(1)
    steps = 0
    while frame is not None:
        steps += frame.f_code is STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps > 1


def _take_state(optimizer: Any) -> None:
    """The parts of a state that was saved of a plain module, and loaded by the user."""
    parts = [p for _, _, p in _members(optimizer) if optimizer.state.get(p) and p in _KEEPINGS]
    for part in parts if any(map(partial(_is_plain, optimizer), parts[:1])) else ():
        keeping, state = _KEEPINGS[part], optimizer.state[part]
        for key, value in state.items():
            if _is_whole(part, key, value):
                state[key] = keeping.wrapped(keeping.part(value), part.device_mesh)


def _is_plain(optimizer: Any, part: Tensor) -> bool:
    return any(_is_whole(part, *item) for item in optimizer.state[part].items())


def _is_whole(part: Tensor, key: str, value: Any) -> bool:
    """Whether a state has a number for each of a parameter's, and is not in parts as it is."""
    is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
    return is_plain and key not in OF_A_STEP and value.shape == part.shape


def _around(
    optimizer: Any, closure: Callable[[], Any], swapped: dict[Tensor, Tensor]
) -> Callable[[], Any]:
    """A closure that is called within a step: it sees the parameters in parts, as ever."""

    @wraps(closure)
    def call() -> Any:
        _scatter(swapped)
        _place(optimizer, swapped)
        found = closure()
        _place(optimizer, {part: whole for whole, part in swapped.items()})
        _gather(swapped)
        return found

    return call


def _after(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Take the parts of what the step has left, and put the parameters back."""
    if optimizer in _SWAPPED and not _is_inner(optimizer):
        _scatter(_SWAPPED[optimizer])
        _put_back(optimizer)


def _put_back(optimizer: Any) -> None:
    swapped = _SWAPPED.pop(optimizer, {})
    _place(optimizer, swapped)
    _move_state(optimizer, swapped)
    for whole in swapped:
        whole.grad = None
        whole.data = whole.data.new_empty(0)


def _place(optimizer: Any, instead: dict[Tensor, Tensor]) -> None:
    """Put other tensors in the places of an optimizer's parameters."""
    for held, place, parameter in _members(optimizer):
        held[place] = instead.get(parameter, parameter)


@torch.no_grad()
def _gather(swapped: dict[Tensor, Tensor]) -> None:
    for whole, part in swapped.items():
        whole.grad = None
        whole.data = part.full_tensor().detach()
        if isinstance(part.grad, DTensor):
            whole.grad = part.grad.full_tensor()
            _GATHERED[whole] = whole.grad, whole.grad._version


@torch.no_grad()
def _scatter(swapped: dict[Tensor, Tensor]) -> None:
    for whole, part in swapped.items():
        keeping, gradient = _KEEPINGS[part], whole.grad
        part._local_tensor.copy_(keeping.part(whole.detach()))
        before, version = _GATHERED.pop(whole, (None, 0))
        if gradient is None:  # a step may clear gradients, or change them
            part.grad = None
        elif gradient is not before or gradient._version != version:
            part.grad = keeping.wrapped(keeping.part(gradient), part.device_mesh)


def _move_state(optimizer: Any, names: dict[Tensor, Tensor]) -> None:
    """The state under the tensors that the optimizer sees now."""
    for old, new in names.items():
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


def _complete_state(optimizer: Any, wholes: Iterable[Tensor]) -> None:
    """State in parts, which an optimizer has made like its parameters before any step."""
    for whole in wholes:
        state = optimizer.state.get(whole, {})
        for key, value in state.items():
            if isinstance(value, DTensor):
                state[key] = value.full_tensor()
