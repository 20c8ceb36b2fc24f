"""The user's Python around a trace: where it is, what it asks for, what it holds.

A trace keeps nothing of what modules, their classes and the globals they name hold in Python's own
values: a forward that changes an attribute in every call, or draws from Python's random numbers,
would repeat the value of its trace. So it is compared before and after.
"""

from __future__ import annotations

import ast
import linecache
import pickle
import random
import sys
import warnings
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from inspect import unwrap
from pathlib import Path
from types import CellType, FrameType, FunctionType, GeneratorType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardfold.errors import ModelError

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)
DEPTH = 4  # of objects within objects that are looked into
VALUES = (bool, int, float, list, dict, set)  # of classes and globals, where they may change
TENSORS = (Tensor, nn.Module)
WITH_STATE = ("array", "collections", "itertools", "numpy", "random")  # modules of such types
ITERATORS = ("iterator", "generator", "bytearray", "enumerate", "zip", "map", "filter", "reversed")
KNOWN_ROOTS = ("torch", "transformers", "functools", "builtins", "typing", "abc", "weakref")
LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
STRUCTURE = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
# Most of what a module has, and nearly always empty.
HOOK_TABLES = {k for k, v in vars(nn.Module()).items() if isinstance(v, dict)} - STRUCTURE


class Unseen:
    """First among the bases of a class that we derive from a user's, whose own do not hear of it.

    A class may keep a register of all that are derived from it.
    """

    def __init_subclass__(cls, **given: Any) -> None:
        pass


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

    @classmethod
    def around(cls, kind: type) -> State:
        """Of a class alone, and the globals that it names."""
        found, known = cls(), dict[int, Any]()
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
    """What a class of modules, and what its methods name, hold in Python's values."""
    if _root(kind) in ("torch", "builtins", "typing", "abc"):
        return
    seen: set[int] = set()
    for name, value in tuple(vars(kind).items()):
        if isinstance(value, VALUES) and not name.startswith("__"):
            yield name, value
        value = getattr(value, "__func__", value)  # of a static method
        value = unwrap(value) if isinstance(value, FunctionType) else value
        if isinstance(value, FunctionType):
            yield from _reached(value, seen)


def _reached(function: FunctionType, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """What a function may change beyond its own: globals, cells, defaults, and so on from there."""
    if id(function) in seen:
        return
    seen.add(id(function))
    code, around = function.__code__, function.__globals__
    where, is_users = around.get("__name__"), _root(function) not in KNOWN_ROOTS
    named = {used: around[used] for used in code.co_names if used in around}
    if is_users:
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        own = f"{function.__name__}."
        given = function.__defaults__ or ()
        named |= {f"{own}{key}": c.cell_contents for key, c in cells if c != CellType()}
        named |= {f"{own}default {key}": value for key, value in enumerate(given)}
        named |= {f"{own}{key}": value for key, value in vars(function).items()}
    for name, value in named.items():
        if isinstance(value, VALUES):
            yield f"{where}.{name}", value
        elif is_users and isinstance(value, FunctionType) and _root(value) == _root(function):
            yield from _reached(value, seen)
        is_own = _has_state(value) or _root(type(value)) == _root(function)
        if is_users and is_own and not isinstance(value, (*VALUES, FunctionType, *TENSORS, type)):
            yield f"{where}.{name}", value


def _root(named: Any) -> str:
    """The package that a class or function is of."""
    return str(getattr(named, "__module__", None)).split(".")[0]


def _has_state(value: Any) -> bool:
    """Whether a value of Python's or NumPy's changes as it is used: iterators, random numbers."""
    kind = type(value)
    is_iterator = _root(kind) == "builtins" and kind.__name__.endswith(ITERATORS)
    return is_iterator or (_root(kind) in WITH_STATE and not isinstance(value, type))


def _state_of(value: Any) -> Any:
    """Something that is another once such a value has changed."""
    if isinstance(value, GeneratorType):
        return None if value.gi_frame is None else value.gi_frame.f_lasti
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some are not to be pickled by Python 3.14
        try:
            return zlib.crc32(pickle.dumps(value))
        except (TypeError, AttributeError, pickle.PicklingError):
            return repr(value)


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
    elif callable(value) and _root(type(value)) in KNOWN_ROOTS:
        inner = getattr(value, "__qualname__", None)  # functions, weak references
    elif depth and isinstance(value, list | tuple):
        inner = tuple(_frozen(each, depth - 1, known) for each in value)
    elif depth and isinstance(value, set | frozenset):
        inner = frozenset(repr(each) for each in value)
    elif depth and isinstance(value, dict):
        inner = tuple((repr(k), _frozen(v, depth - 1, known)) for k, v in value.items())
    elif _has_state(value):
        inner = _state_of(value)
    elif depth and _root(type(value)) != "shardfold":  # our own notes on a hollow model
        held = [k for kind in type(value).__mro__ for k in vars(kind).get("__slots__", ())]
        items = (*getattr(value, "__dict__", {}).items(), *_slots(value, held))
        inner = tuple((name, _frozen(each, depth - 1, known)) for name, each in items) or None
    known[key] = (type(value).__name__, inner)
    return known[key]


def _slots(value: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    return ((name, getattr(value, name)) for name in names if hasattr(value, name))


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


def place(paths: dict[int, str]) -> str:
    """The module and the line of the user's code that is running: `module 'a.b' (file.py:12)`."""
    frame: FrameType | None = sys._getframe(1)
    line, found = "", None
    while frame is not None and (found is None or not line):
        file = frame.f_code.co_filename
        if frame.f_code.co_name == "_export" and file.startswith(LIBRARIES[1]):
            break  # what is further out calls shardfold
        if not line and not file.startswith(LIBRARIES) and not _is_pythons(file):
            line = f"{Path(file).name}:{frame.f_lineno}"
        owner = owner_of(frame)
        if owner is not None and found is None:
            found = paths.get(id(attributes_of(owner)))
        frame = frame.f_back
    name = f"module {found!r}" if found else "The model's forward"
    return f"{name} ({line})" if line else name


def _is_pythons(file: str) -> bool:
    """Whether code is of Python itself, or was made by it."""
    is_standard = file.startswith(str(Path(ast.__file__).parent)) and "site-packages" not in file
    return is_standard or file in ("<string>", "<frozen importlib._bootstrap>")


def owner_of(frame: FrameType) -> nn.Module | None:
    """The module whose method is running, if one is: its first argument."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    found = frame.f_locals.get(names[0]) if names else None
    return found if isinstance(found, nn.Module) else None


def frames() -> Iterator[FrameType]:
    """Where the code that is traced is now: torch's frames, up to the innermost of the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        torchs, ours = (frame.f_code.co_filename.startswith(path) for path in LIBRARIES)
        if not ours:
            yield frame
        if not torchs and not ours:
            return
        frame = frame.f_back


def outcome_without_error(frame: FrameType) -> bool | None:
    """What a condition must be for `if condition: raise ...` or `assert condition` to go on.

    None where the running expression is no such condition.
    """
    line, column = _position(frame)
    _, node = asking(frame)
    if node is None:
        return None
    if isinstance(node, ast.Assert):
        return _needed(node.test, True, line, column)
    raises = all(isinstance(each, ast.Raise) for each in node.body)
    return _needed(node.test, False, line, column) if raises and not node.orelse else None


def asking(frame: FrameType) -> tuple[ast.Module | None, ast.If | ast.Assert | None]:
    """The code of a frame's file, and the statement there that asks the running condition."""
    line, column = _position(frame)
    tree = _tree(frame)
    for node in () if tree is None else ast.walk(tree):
        if isinstance(node, ast.If | ast.Assert) and _asks(node, line, column):
            return tree, node
    return tree, None


def looping(frame: FrameType) -> tuple[ast.Module | None, ast.For | None]:
    """The code of a frame's file, and the loop there whose next turn is asked for."""
    line, column = _position(frame)
    tree = _tree(frame)
    for node in () if tree is None else ast.walk(tree):
        if isinstance(node, ast.For) and (node.lineno, node.col_offset) == (line, column):
            return tree, node
    return tree, None


def _tree(frame: FrameType) -> ast.Module | None:
    """The code of a frame's file; of a notebook's cell, too."""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    try:
        return ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return None


def _position(frame: FrameType) -> tuple[int, int]:
    """The line and the column of the running expression; -1 where they are not known."""
    line, _, column, _ = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    return (-1, -1) if line is None or column is None else (line, column)


def is_within(frame: FrameType, first: int, last: int) -> bool:
    """Whether a function is running, at one of these lines."""
    found: FrameType | None = sys._getframe(1)
    while found is not None and found is not frame:
        found = found.f_back
    return found is not None and first <= frame.f_lineno <= last


def plain_locals(frame: FrameType, names: set[str]) -> dict[str, Any]:
    """The numbers of Python's among a function's names."""
    held = frame.f_locals
    return {name: held[name] for name in names if name in held and isinstance(held[name], PLAIN)}


def _asks(node: ast.If | ast.Assert, line: int, column: int) -> bool:
    """Whether the condition of a statement is at a place; `if not x` is at that of the `if`."""
    return (node.lineno, node.col_offset) == (line, column) or _holds(node.test, line, column)


def _holds(node: ast.expr, line: int, column: int) -> bool:
    end = (node.end_lineno or node.lineno, node.end_col_offset or 0)
    return (node.lineno, node.col_offset) <= (line, column) < end


def _needed(test: ast.expr, wanted: bool, line: int, column: int) -> bool | None:
    """What the part of a condition at a place must be for the whole to be as wanted."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _needed(test.operand, not wanted, line, column)
    if isinstance(test, ast.BoolOp):
        parts = [part for part in test.values if _holds(part, line, column)]
        return _needed(parts[0], wanted, line, column) if parts else None
    return wanted
