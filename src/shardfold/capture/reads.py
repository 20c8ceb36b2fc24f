"""Which attributes a module's forward really reads, and whether two modules agree on them.

Two modules of the same class, the same tree and the same parameter shapes run the same code
unless something that the code reads differs. So while one of them is traced, every attribute
read on it and its children is noted; another one is a replica if all those attributes are equal.
A layer index that nobody reads does not matter; a dropout rate, an eps, a flag, a patched
forward or a hook does.

A module inside a block goes by its position in a walk over the tree. One that is there twice has
two positions: in another block two modules may stand there, and both must agree with it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import is_, itemgetter
from types import MethodType
from typing import Any

import torch
from torch import nn

Reads = set[tuple[int, str]]  # (position of the module inside the block, attribute)

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)
# Compared as structure, by the fingerprint, not by value.
STRUCTURE = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
ALL = "__dict__"  # read as an attribute: everything that the module has may have been read


def modules_of(block: nn.Module) -> list[nn.Module]:
    """A module and those inside it, by position; one that is there twice is listed twice."""
    found = [block]
    for child in block._modules.values():
        if child is not None:
            found += modules_of(child)
    return found


def is_compared(name: str) -> bool:
    """Attributes to compare; a module with hooks is no block, so all hooks are alike: none."""
    return name not in STRUCTURE and not (name.startswith("_") and "hooks" in name)


@contextmanager
def recording(block: nn.Module) -> Iterator[Reads]:
    """Note every attribute that is read on `block` or a module in it."""
    reads: Reads = set()
    positions: dict[nn.Module, list[int]] = {}
    for position, module in enumerate(modules_of(block)):
        positions.setdefault(module, []).append(position)
    classes = {module: module.__class__ for module in positions}
    for module, places in positions.items():
        module.__class__ = _recorder(classes[module], places, reads)
    try:
        yield reads
    finally:
        for module, cls in classes.items():
            module.__class__ = cls


def _recorder(cls: type[nn.Module], positions: list[int], reads: Reads) -> type[nn.Module]:
    """A subclass that behaves the same and notes what is read."""

    def noted(self: nn.Module, name: str) -> Any:
        if not name.startswith("__"):
            if is_compared(name):
                reads.update((position, name) for position in positions)
        elif name == ALL and not _torch_asks():
            reads.update((position, ALL) for position in positions)
        return object.__getattribute__(self, name)

    recorder: type[nn.Module] = type(
        cls.__name__, (cls,), {"__getattribute__": noted, "__module__": cls.__module__}
    )
    return recorder


def _torch_asks() -> bool:
    """Whether torch's own code reads a module's dictionary, as it does for every parameter."""
    return str(sys._getframe(2).f_globals.get("__name__")).startswith("torch.")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What was read of one module: attributes that it has, with values, and those it has not."""

    position: int
    owner: nn.Module
    names: tuple[str, ...]
    values: tuple[Any, ...]
    absent: frozenset[str]
    is_all: bool
    take: Callable[[Any], Any]  # the values of another module's dictionary

    def fits(self, other: nn.Module) -> bool:
        """Whether another module has the same."""
        theirs = vars(other)
        if not self.absent.isdisjoint(theirs):
            return False
        if self.is_all and set(filter(is_compared, theirs)) != set(self.names):
            return False
        try:
            values = self.take(theirs)
        except KeyError:
            return False
        if all(map(is_, self.values, values)):
            return True
        pairs = zip(self.values, values, strict=False)
        return all(_equal(a, b, self.owner, other) for a, b in pairs)


def footprints(modules: Sequence[nn.Module], reads: Reads) -> list[Footprint]:
    """What `reads` found on the modules of a block."""
    by_position: dict[int, set[str]] = {}
    for position, name in reads:
        by_position.setdefault(position, set()).add(name)
    found = []
    for position, names in by_position.items():
        own = vars(modules[position])
        is_all = ALL in names
        names = (names | set(filter(is_compared, own)) if is_all else names) - {ALL}
        present = tuple(name for name in names if name in own)
        values = tuple(own[name] for name in present)
        absent = frozenset(names - set(present))
        take = itemgetter(*present, *present[:1]) if present else tuple  # never a lone value
        owner = modules[position]
        found.append(Footprint(position, owner, present, values, absent, is_all, take))
    return found


def agree(prints: Sequence[Footprint], modules: Sequence[nn.Module]) -> bool:
    """Whether the modules of another block of the same structure have what was read of one."""
    return all(each.fits(modules[each.position]) for each in prints)


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
