"""Objects that blocks share, and whether running a block changes one.

Blocks may hold one object, such as their configuration: whoever reads it reads the same. That is
no longer true once a block writes into it: what the next block reads depends on how many ran
before, and none can stand for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from shardfold.capture.reads import PLAIN, is_compared

DEPTH = 4  # of objects within objects that are looked into
OPAQUE = (nn.Module, torch.Tensor, FunctionType, BuiltinFunctionType, MethodType)

State = dict[tuple[int, str], Any]  # by position of the module and attribute


def state_of(modules: Sequence[nn.Module]) -> State:
    """What the objects hold that a block's modules have as attributes."""
    known: dict[int, Any] = {}
    return {
        (position, name): _state(value, DEPTH, known)
        for position, module in enumerate(modules)
        for name, value in vars(module).items()
        if not isinstance(value, PLAIN) and is_compared(name)
    }


def changed(before: State, modules: Sequence[nn.Module]) -> frozenset[tuple[int, str]]:
    """The attributes that still hold the same object, with something else in it."""
    after = state_of(modules)
    return frozenset(
        key
        for key, (identity, inner) in before.items()
        if key in after and after[key][0] == identity and after[key][1] != inner
    )


def _state(value: Any, depth: int, known: dict[int, Any]) -> Any:
    """A value as (identity, what is in it); plain values stand for themselves."""
    if isinstance(value, PLAIN):
        return value
    key = id(value)
    if key in known:
        return known[key]
    known[key] = (key, None)  # an object that is met inside itself
    inner: Any = None
    if depth and not isinstance(value, OPAQUE):
        if isinstance(value, list | tuple | set | frozenset):
            inner = [_state(each, depth - 1, known) for each in value]
        elif isinstance(value, dict):
            inner = {name: _state(each, depth - 1, known) for name, each in value.items()}
        elif hasattr(value, "__dict__"):
            own = vars(value).items()
            inner = {name: _state(each, depth - 1, known) for name, each in own}
    known[key] = (key, inner)
    return known[key]
