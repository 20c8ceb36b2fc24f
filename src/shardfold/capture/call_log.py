"""Logs of a traced forward: attributes read, functions called, and shared objects written.

Attributes: which ones a module's forward reads, and whether two modules agree on them.

Two modules of the same class, the same tree and the same parameter shapes run the same code
unless something that the code reads differs. So while one of them is traced, every attribute
read on it and its children is noted; another one is a replica if all those attributes are equal.
A layer index that nobody reads does not matter; a dropout rate, an eps, a flag, a patched
forward or a hook does.

A module inside a block goes by its position in a walk over the tree. One that is there twice has
two positions: in another block two modules may stand there, and both must agree with it.

Calls: what a model does around its blocks, as a list of events.

While the model runs on meta tensors, every torch function that gives a tensor is an event, and
so is every call of a block. An event names what was called, its plain arguments, and for each
tensor where it came from: an earlier event's output, a parameter, an input. Two runs with equal
events did the same.

Shared state: objects that blocks share, and whether running a block changes one.

Blocks may hold one object, such as their configuration: whoever reads it reads the same. That is
no longer true once a block writes into it: what the next block reads depends on how many ran
before, and none can stand for another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

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


@dataclass(frozen=True, slots=True)
class Ref:
    """The `output`-th tensor that the event at `index` gave."""

    index: int
    output: int


@dataclass(frozen=True, slots=True)
class Event:
    """One call: its name, its arguments with tensors as `Ref`s or names, its outputs' types."""

    name: str
    arguments: tuple[Any, ...]
    outputs: tuple[Any, ...]


@dataclass(slots=True)
class Log:
    """The events of one run; tensors are kept, so that none takes another's identity."""

    events: list[Event] = field(default_factory=list)
    blocks: list[tuple[int, int, str]] = field(default_factory=list)  # event, behaviour, path
    paths: set[str] = field(default_factory=set)  # of the blocks called so far
    known: dict[int, Any] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)
    is_paused: bool = False

    @classmethod
    def of(cls, model: nn.Module, args: Any, kwargs: Any) -> Log:
        """A log that knows the model's tensors and inputs by name."""
        log = cls()
        named = [*model.named_parameters(), *model.named_buffers()]
        inputs = pytree.tree_flatten((args, kwargs))[0]
        named += [(f"input {i}", leaf) for i, leaf in enumerate(inputs)]
        for name, tensor in named:
            if isinstance(tensor, torch.Tensor):
                log.known.setdefault(id(tensor), name)
                log.alive.append(tensor)
        return log

    def note(self, name: str, arguments: list[Any], outputs: list[Any]) -> None:
        """Add an event, unless the log is paused."""
        if self.is_paused:
            return
        index = len(self.events)
        refs = tuple(self._argument(leaf) for leaf in arguments)
        tensors = [o for o in outputs if isinstance(o, torch.Tensor)]
        kinds = tuple((tuple(t.shape), t.stride(), t.dtype) for t in tensors)
        self.events.append(Event(name, refs, kinds))
        for position, tensor in enumerate(tensors):
            self.known[id(tensor)] = Ref(index, position)
            self.alive.append(tensor)

    def block(self, behaviour: int, path: str, leaves: list[Any], outputs: list[Any]) -> None:
        """Add the call of a block."""
        self.blocks.append((len(self.events), behaviour, path))
        self.paths.add(path)
        self.note(f"block {behaviour}", leaves, outputs)

    def _argument(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.known.get(id(leaf), "unknown tensor")
        return f"{type(leaf).__name__} {leaf!r}"

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is noted inside."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before


class Recorder(TorchFunctionMode):
    """Notes every torch function that gives a tensor."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call the function, and note it."""
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if not self.log.is_paused:
            outputs = pytree.tree_flatten(result)[0]
            if any(isinstance(o, torch.Tensor) for o in outputs):
                name = resolve_name(function) or repr(function)
                self.log.note(name, pytree.tree_flatten((args, kwargs))[0], outputs)
        return result


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
