"""Which attributes a module's forward really reads, and whether two modules agree on them.

Two modules of the same class, the same tree and the same parameter shapes run the same code
unless something that the code reads differs. So while one of them is traced, every attribute
read on it and its children is noted; another one is a replica if all those attributes are equal.
A layer index that nobody reads does not matter; a dropout rate, an eps, a flag, a patched
forward or a hook does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

Reads = set[tuple[str, str]]  # (path of the module inside the block, attribute)
Tree = Mapping[str, nn.Module]  # a module and those inside it, by path

MISSING = object()
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)
# Compared as structure, by the fingerprint, not by value.
STRUCTURE = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}


def _is_compared(name: str) -> bool:
    """Attributes to compare; a module with hooks is no block, so all hooks are alike: none."""
    return name not in STRUCTURE and not (name.startswith("_") and "hooks" in name)


@contextmanager
def recording(block: nn.Module) -> Iterator[Reads]:
    """Note every attribute that is read on `block` or a module in it."""
    reads: Reads = set()
    classes = {path: module.__class__ for path, module in block.named_modules()}
    modules = dict(block.named_modules())
    for path, module in modules.items():
        module.__class__ = _recorder(classes[path], path, reads)
    try:
        yield reads
    finally:
        for path, module in modules.items():
            module.__class__ = classes[path]


def _recorder(cls: type[nn.Module], path: str, reads: Reads) -> type[nn.Module]:
    """A subclass that behaves the same and notes what is read."""

    def noted(self: nn.Module, name: str) -> Any:
        if not name.startswith("__") and _is_compared(name):
            reads.add((path, name))
        return object.__getattribute__(self, name)

    recorder: type[nn.Module] = type(
        cls.__name__, (cls,), {"__getattribute__": noted, "__module__": cls.__module__}
    )
    return recorder


def agree(one: Tree, other: Tree, reads: Reads) -> bool:
    """Whether two modules of one structure have equal values in all attributes of `reads`."""
    for path, name in reads:
        ours, theirs = one[path], other[path]
        a, b = vars(ours).get(name, MISSING), vars(theirs).get(name, MISSING)
        if a is not b and not _equal(a, b, ours, theirs):
            return False
    return True


def _equal(a: Any, b: Any, owner: nn.Module, twin: nn.Module) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, PLAIN):
        return bool(a == b)
    if isinstance(a, partial):
        parts = (a.func, a.args, a.keywords), (b.func, b.args, b.keywords)
        return _equal(*parts, owner, twin)
    if isinstance(a, MethodType):
        return a.__func__ is b.__func__ and a.__self__ is owner and b.__self__ is twin
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(
            _equal(x, y, owner, twin) for x, y in zip(a, b, strict=True)
        )
    if isinstance(a, dict):
        return list(a) == list(b) and all(_equal(a[k], b[k], owner, twin) for k in a)
    return False
