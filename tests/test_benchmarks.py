"""Benchmarks run rarely: what they take from the library must be there when they do."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.parametrize("program", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_every_name_that_a_benchmark_imports_exists(program: Path) -> None:
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardfold"):
            module = import_module(node.module or "")
            for name in (alias.name for alias in node.names):
                is_there = hasattr(module, name) or find_spec(f"{node.module}.{name}") is not None
                assert is_there, f"{node.module}.{name}"
