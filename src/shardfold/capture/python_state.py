"""What a model's modules, their classes and the globals they name hold in Python's own values.

A trace keeps none of it: a forward that changes an attribute in every call, or draws from Python's
random numbers, would repeat the value of its trace. So it is compared before and after.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardfold.errors import ModelError

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)
DEPTH = 4  # of objects within objects that are looked into
VALUES = (bool, int, float, list, dict, set)  # of classes and globals, where they may change
STRUCTURE = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
# Most of what a module has, and nearly always empty.
HOOK_TABLES = {k for k, v in vars(nn.Module()).items() if isinstance(v, dict)} - STRUCTURE


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """As `vars`, unseen: while a block is recorded, that counts as reading all its attributes."""
    found: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return found


@dataclass(slots=True)
class State:
    """Python attributes of a model's modules: comparable values, and the objects themselves."""

    values: dict[tuple[str, str], Any] = field(default_factory=dict)
    objects: dict[tuple[str, str], Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> State:
        """Of every module; tensors, parameters and children apart."""
        found, modules = cls(), list(model.named_modules())
        known = _named_tensors(modules)
        for path, module in modules:
            for name, value in attributes_of(module).items():
                if name not in STRUCTURE and (name not in HOOK_TABLES or value):
                    found.values[path, name] = _frozen(value, DEPTH, known)
                    found.objects[path, name] = value
        for kind in {kind: None for _, module in modules for kind in type(module).__mro__}:
            for name, value in values_around(kind):
                found.values[kind.__name__, name] = _frozen(value, DEPTH, known)
        return found

    def changed(self, later: State) -> list[tuple[str, str]]:
        """The attributes with another value, or that were not there before."""
        missing = object()
        keys = {**self.values, **later.values}
        return [
            key for key in keys if self.values.get(key, missing) != later.values.get(key, missing)
        ]

    def restore(self, model: nn.Module) -> None:
        """Give the modules these attributes."""
        for (path, name), value in self.objects.items():
            vars(model.get_submodule(path))[name] = value


def _named_tensors(modules: Iterable[tuple[str, nn.Module]]) -> dict[int, Any]:
    """Parameters and buffers by identity, frozen as their names: a trace puts others in place."""
    known: dict[int, Any] = {}
    for path, module in modules:
        for group in ("_parameters", "_buffers"):
            for name, tensor in attributes_of(module)[group].items():
                known.setdefault(id(tensor), ("tensor", f"{path}.{name}"))
    known.pop(id(None), None)
    return known


def values_around(kind: type) -> Iterator[tuple[str, Any]]:
    """What a class of modules, and the globals that its methods name, hold in Python's values."""
    if kind.__module__.split(".")[0] in ("torch", "builtins", "typing", "abc"):
        return
    for name, value in tuple(vars(kind).items()):
        if isinstance(value, VALUES) and not name.startswith("__"):
            yield name, value
        code = getattr(value, "__code__", None)
        around = getattr(value, "__globals__", {})
        for used in code.co_names if code is not None else ():
            if isinstance(around.get(used), VALUES):
                yield f"{around.get('__name__')}.{used}", around[used]


def shown(frozen: Any) -> str:
    """A frozen value as Python writes it, as far as that is known."""
    if frozen is None:
        return "nothing"
    kind, inner = frozen
    if kind == "list":
        return f"[{', '.join(map(shown, inner))}]" if isinstance(inner, tuple) else "a list"
    if kind == "dict" and isinstance(inner, tuple):
        return "{" + ", ".join(f"{key}: {shown(each)}" for key, each in inner) + "}"
    is_plain = isinstance(inner, PLAIN) and kind == type(inner).__name__
    return repr(inner) if is_plain else f"a {kind}"


def _frozen(value: Any, depth: int, known: dict[int, Any]) -> Any:
    """A value in a form that can be compared after the object has changed."""
    if isinstance(value, PLAIN):
        return (type(value).__name__, value)
    key = id(value)
    if key in known:
        return known[key]
    known[key] = ("itself", None)
    inner: Any = None
    if isinstance(value, nn.Module):
        inner = key
    elif isinstance(value, Tensor):
        inner = tuple(value.shape)
    elif callable(value):  # functions, weak references
        inner = getattr(value, "__qualname__", None)
    elif depth and isinstance(value, list | tuple):
        inner = tuple(_frozen(each, depth - 1, known) for each in value)
    elif depth and isinstance(value, set | frozenset):
        inner = frozenset(repr(each) for each in value)
    elif depth and isinstance(value, dict):
        inner = tuple((repr(k), _frozen(v, depth - 1, known)) for k, v in value.items())
    elif depth and hasattr(value, "__dict__"):
        items = vars(value).items()
        inner = tuple((name, _frozen(each, depth - 1, known)) for name, each in items)
    known[key] = (type(value).__name__, inner)
    return known[key]


def dice() -> dict[str, Any]:
    """The state of the random numbers that are not torch's."""
    return {
        "Python's random": random.getstate(),
        "numpy.random": pickle.dumps(np.random.get_state()),
    }


def check_dice(before: dict[str, Any]) -> None:
    """Refuse a forward that drew from them."""
    drawn = next((name for name, now in dice().items() if now != before[name]), None)
    if drawn:
        raise ModelError(
            f"The model's forward draws from {drawn}: a captured program would repeat the "
            "numbers of its trace in every step, and ranks would differ. Draw outside the model "
            "and pass the numbers in as tensors, or use nn.Dropout."
        )
