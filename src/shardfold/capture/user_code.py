"""Where the user's code is while it is traced, and what its conditions are for."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from shardfold.capture.python_state import attributes_of

LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def place(paths: dict[int, str]) -> str:
    """The module and the line of the user's code that is running: `module 'a.b' (file.py:12)`."""
    frame: FrameType | None = sys._getframe(1)
    line, found = "", None
    while frame is not None and (found is None or not line):
        file = frame.f_code.co_filename
        if not line and not file.startswith(LIBRARIES):
            line = f"{Path(file).name}:{frame.f_lineno}"
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and found is None:
            found = paths.get(id(attributes_of(owner)))
        frame = frame.f_back
    name = f"module {found!r}" if found else "The model's forward"
    return f"{name} ({line})" if line else name


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
    positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    line, _, column, _ = positions
    if line is None or column is None:
        return None
    # Of a notebook's cell, too.
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.Assert) and _asks(node, line, column):
            if isinstance(node, ast.Assert):
                return _needed(node.test, True, line, column)
            raises = all(isinstance(each, ast.Raise) for each in node.body)
            return _needed(node.test, False, line, column) if raises and not node.orelse else None
    return None


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
