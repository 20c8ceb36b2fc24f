"""A model that was captured once in a run of the tests is not captured again, in any process.

Programs are kept in memory and in a folder of the run. They are found by a digest of all that a
capture may depend on: the model's classes with their code and the values around them, attributes,
buffers, the kinds of its parameters, the kinds of its inputs, and the options. What cannot be
written down so (a model of a class within a function, a loss that is a lambda) is captured anew.
Tests of capture itself do without (`tests/unit/capture/conftest.py`).
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import marshal
import os
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from shardfold.capture.capture import check_model, check_modules, has_global_hooks, on_meta
from shardfold.capture.program import Program
from shardfold.capture.repeated_blocks import FEWEST_PERIODS, Survey
from shardfold.capture.user_code import values_around
from shardfold.runtime.evaluate import Original

LIBRARIES = ("torch", "transformers", "builtins", "collections", "functools", "enum")
PROCESS_HASH = "_original_object_hash"  # of transformers: another number in every process
UNWRITABLE = (
    pickle.PicklingError,
    AttributeError,
    TypeError,
    ValueError,
    RuntimeError,
)  # of pickle


class Captures:
    """Programs by the digest of what they were captured from."""

    is_on = True

    def __init__(self, folder: Path) -> None:
        self.folder, self.known = folder, dict[str, Program]()

    def get(self, given: Any, capture: Callable[[], Program]) -> Program:
        """The program of what is given; captured if nobody has done so yet."""
        key = _digest(given) if self.is_on and not has_global_hooks() else None
        if key is None:
            return capture()
        if key not in self.known:
            with self._alone(key):
                self.known[key] = self._read(key) or self._write(key, capture())
        return self.known[key]

    @contextmanager
    def _alone(self, key: str) -> Iterator[None]:
        """Others that want the same program wait, and then read it."""
        with (self.folder / f"{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _read(self, key: str) -> Program | None:
        path = self.folder / key
        if not path.exists():
            return None
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of torch's own
            program: Program = pickle.loads(path.read_bytes())
        return program

    def _write(self, key: str, program: Program) -> Program:
        written = io.BytesIO()
        with suppress(*UNWRITABLE):
            _Writer(written, pickle.HIGHEST_PROTOCOL).dump(program)
            part = self.folder / f"{key}.{os.getpid()}"
            part.write_bytes(written.getvalue())
            part.rename(self.folder / key)  # whole, or not there
        return program


@contextmanager
def captured_once(folder: Path) -> Iterator[None]:
    """Within this, models are captured once; `folder` is shared with other processes."""
    captures = Captures(folder)
    module = import_module("shardfold.capture.capture")
    trace, evaluate = module._trace, Original.in_eval

    def traced(model: Any, args: Any, kwargs: Any, dtype: Any, loss: Any, folding: Any) -> Program:
        check_model(model)
        check_modules(model)
        example = on_meta((tuple(args), dict(kwargs or {})), dtype)
        if len(Survey(model).blocks()) < FEWEST_PERIODS:  # in any way of folding the same
            folding = folding and module._fold_all
        given = (model, example, dtype, loss, folding)
        return captures.get(given, lambda: trace(model, args, kwargs, dtype, loss, folding))

    def evaluated(original: Original) -> Program:
        given = (original.model, original.example, original.loss, "evaluation")
        return captures.get(given, lambda: evaluate(original))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_trace", traced)
        patch.setattr(Original, "in_eval", evaluated)
        yield


@contextmanager
def captured_anew() -> Iterator[None]:
    """Within this, every model is captured, whoever has done so before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Captures, "is_on", False)
        yield


class _Writer(pickle.Pickler):
    """Writes torch's operators by their names."""

    def reducer_override(self, value: Any) -> Any:
        return (_operator, (str(value),)) if isinstance(value, OpOverload) else NotImplemented


def _operator(name: str) -> Any:
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _digest(given: Any) -> str | None:
    """Of everything that a capture may depend on; None where that cannot be written down."""
    modes = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))
    written = io.BytesIO()
    try:
        _Facts(written).dump((given, modes))
    except UNWRITABLE:
        return None
    return hashlib.sha256(written.getvalue()).hexdigest()


class _Facts(_Writer):
    """Writes parameters without their numbers, and functions and classes with their code.

    What it writes is compared, and never read.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.numbers: dict[int, int] = {}  # of tensors, by identity
        self.begun: set[int] = set()  # functions and classes

    def reducer_override(self, value: Any) -> Any:
        if hasattr(value, PROCESS_HASH):
            return list, ([kept for kept in vars(value).items() if kept[0] != PROCESS_HASH],)
        if not isinstance(value, type | FunctionType) or _is_of_a_library(value):
            return super().reducer_override(value)
        name = f"{value.__module__}.{value.__qualname__}"
        if id(value) in self.begun:  # it is named within itself
            return str, (name,)
        self.begun.add(id(value))
        return tuple, ((name, *(_class if isinstance(value, type) else _function)(value)),)

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, str):  # pickle writes the same object in short, and an equal one not
            return value.encode()
        if isinstance(value, weakref.ref):
            return "reference", self.persistent_id(value())
        if isinstance(value, set | frozenset) and all(isinstance(each, str) for each in value):
            return type(value).__name__, sorted(value)
        return self._tensor(value) if isinstance(value, Tensor) else None

    def _tensor(self, value: Tensor) -> Any:
        number = self.numbers.setdefault(id(value), len(self.numbers))  # one tensor, several names
        numbers = None
        if not isinstance(value, nn.Parameter) and not value.is_meta:
            whole = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
            numbers = hashlib.sha256(whole.numpy()).digest()
        kind = (type(value).__qualname__, str(value.dtype), str(value.device), value.requires_grad)
        return number, *kind, tuple(value.shape), value.stride(), numbers, dict(vars(value))


def _is_of_a_library(value: Any) -> bool:
    return (value.__module__ or "").split(".")[0] in LIBRARIES


def _class(value: type) -> Any:
    """The bases of a class, its methods and values, and the Python values that its methods name."""
    parts = vars(value).items()
    own = [(k, v) for k, v in parts if isinstance(v, FunctionType | bool | int | float | str)]
    return value.__bases__, own, list(values_around(value))


def _function(value: FunctionType) -> Any:
    """The code of a function, and what it is bound to."""
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
    named = [
        (name, value.__globals__[name])
        for name in value.__code__.co_names
        if isinstance(value.__globals__.get(name), bool | int | float | str | FunctionType)
    ]
    return marshal.dumps(value.__code__), cells, value.__defaults__, value.__kwdefaults__, named
