"""What a model does around its blocks, as a list of events.

While the model runs on meta tensors, every torch function that gives a tensor is an event, and
so is every call of a block. An event names what was called, its plain arguments, and for each
tensor where it came from: an earlier event's output, a parameter, an input. Two runs with equal
events did the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree


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
