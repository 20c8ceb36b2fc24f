"""`torch.export` with errors that say which module stopped it and what to change."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from shardfold.capture.guards import State, watching
from shardfold.errors import ModelError

ADVICE = (
    (
        r"data.dependent|Could not guard|Could not extract specialized|is_nonzero|\.item\(\)"
        r"|_local_scalar_dense|unbacked|aten\.nonzero|Cannot copy out of meta",
        "A branch or a shape depends on the values of a tensor. Make the choice from shapes or "
        "configuration, or use torch.where, torch.cond or masking instead",
    ),
    (
        r"same device|DeviceMismatch",
        "A tensor is made on a fixed device: make it on the device of the input (device=x.device) "
        "or register it as a buffer",
    ),
    (
        r"Cache|past_key_values|use_cache",
        "The model returns or updates a cache: pass use_cache=False",
    ),
    (
        r"pytree|is an input, but|Unsupported output|type .* is not supported|return_dict",
        "An input or output is of a type that cannot be traced: return tensors, tuples or dicts "
        "(Hugging Face models: pass return_dict=False or use_cache=False)",
    ),
    (
        r"missing .* required|unexpected keyword|takes .* positional|too many positional",
        "The example arguments do not match the signature of forward",
    ),
    (
        r"Meta device|meta kernel|meta tensor|NotImplementedError.*Meta|fake",
        "An operator has no shape function for tensors without data: register one with "
        "torch.library.register_fake",
    ),
)


@dataclass(frozen=True, slots=True)
class Traced:
    """An exported program, and what was seen while forward ran."""

    program: ExportedProgram
    notes: tuple[str, ...]
    before: State  # of the modules' Python attributes
    after: State


def export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Trace `model` on meta tensors; whole operators stay whole, and what gets lost is refused."""
    hint = ""
    try:
        # Tensors that forward makes without naming a device must meet the inputs where they are.
        with quiet(), torch.device("meta"), watching(model) as watch:
            try:
                program = torch.export.export(model, args, kwargs, strict=False)
            finally:
                hint = watch.hint
        return Traced(program, tuple(watch.notes), watch.before, watch.after)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(_explain(model, error, hint)) from error


def _explain(model: nn.Module, error: BaseException, hint: str) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), "").strip()
    text = f"{type(error).__name__}: {error}"
    advice = hint or next((hint for pattern, hint in ADVICE if re.search(pattern, text)), None)
    where = _failing_module(model, error)
    return (
        f"The model could not be traced: {where} failed with {type(error).__name__}: "
        f"{first[:300]}\n{advice or 'Check that forward runs on meta tensors by itself'}."
    )


def _failing_module(model: nn.Module, error: BaseException) -> str:
    """The deepest module of `model` whose code was running when the error was raised."""
    paths = {id(vars(module)): path for path, module in model.named_modules()}
    found = f"the model ({type(model).__name__})"
    for frame in _frames(error.__traceback__):
        owner = frame.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and paths.get(id(vars(owner))):
            code = frame.tb_frame.f_code
            name = code.co_filename.rsplit("/", 1)[-1]
            if name != "module.py":
                line = f"{name}:{frame.tb_lineno}"
                found = f"module {paths[id(vars(owner))]!r} ({type(owner).__name__}, {line})"
    return found


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


@contextmanager
def quiet() -> Iterator[None]:
    """No advice of torch's own on stderr: what fails is explained by our error.

    Where a branch depends on data, torch prints the program that it has so far.
    """
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
