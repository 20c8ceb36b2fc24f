"""Repeated blocks: found in a module tree, and a deep model cut to a few of them.

Blocks are found by structure and not by name. A block is a module with children of its own whose
fingerprint (class, children, shapes and dtypes of parameters and buffers) occurs at least three
times. The outermost such modules are taken: the layers of a Transformer, the bottlenecks of a
ResNet, the branches of an Inception module. A module with hooks, or with a parameter that is used
outside it too, is never one.

Of a model, only what is around its repeated blocks is copied. In the copy, a shell stands for each
block: it looks like the block from outside, holds no parameters or children, and asks whoever holds
the copy what to answer when it is called. A block itself is copied when it is run for the first
time, so a thousand equal layers cost a thousand shells and a copy of one.

A deep model is cut to a few periods of each run of blocks, with proof that the rest repeats. The
full model is run on meta tensors, blocks answered by stubs (`replicas`), and its events are
logged (`call_log`). A run is a stretch of blocks with a repeating pattern of behaviours. Its period
is a block or a few, and what the model does before them; every period but the first must do the
same as the one before, on what that one left and on what was there before the run. Then all but
the first three and the last two periods are taken out of the model, and what the short model does
must be what the full one did without them. A depth of 1,000 so costs a thousand stub calls, and
nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from shardfold.capture.call_log import Event, Log, Ref
from shardfold.capture.export import (
    EMPTY,
    UNCHANGING,
    Twins,
    WithLoss,
    copies_itself,
    for_training,
    functions_of,
    skeleton,
)
from shardfold.capture.user_code import Unseen

FEWEST = 3


@dataclass(frozen=True, slots=True)
class Found:
    """A block of the tree, and the kind that it has in common with others."""

    module: nn.Module
    kind: int


class Survey:
    """One walk over a module tree: what each module is made of, and who shares parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.prints: dict[int, int] = {}  # of each module, by identity
        self.known: dict[Any, tuple[int, int]] = {}  # fingerprint -> its number, modules inside
        self.hooked: set[int] = set()  # modules with a hook on them or inside
        self.wilful: set[int] = set()  # with an own idea of training mode, on them or inside
        self.holders: Counter[int] = Counter()  # of each parameter: modules at different paths
        self.classes: dict[type[nn.Module], bool] = {}  # and whether they have their own `train`
        self.originals: dict[int, Any] = {}  # every module, parameter and buffer, by identity
        self._visit(model)

    def _visit(self, module: nn.Module) -> tuple[int, int]:
        """The number of a module's fingerprint and how many modules it holds.

        Equal fingerprints have one number, so that comparing is comparing numbers.
        """
        own, kind = vars(module), type(module)
        if kind not in self.classes:
            self.classes[kind] = kind.train is not nn.Module.train
        wilful = self.classes[kind] or "train" in own
        hooked = bool(
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
        )
        children, inside = [], 1
        for name, child in own["_modules"].items():
            if child is not None:
                number, size = self._visit(child)
                children.append((name, number))
                inside += size
                hooked = hooked or id(child) in self.hooked
                wilful = wilful or id(child) in self.wilful
        if hooked:
            self.hooked.add(id(module))
        if wilful:
            self.wilful.add(id(module))
        key = (kind, tuple(children), self._tensors(own))
        found = self.known.setdefault(key, (len(self.known), inside))
        self.prints[id(module)] = found[0]
        self.originals[id(module)] = module
        return found

    def _tensors(self, own: Mapping[str, Any]) -> tuple[Any, ...]:
        """What a module itself holds."""
        found = []
        for name, tensor in own["_parameters"].items():
            if tensor is not None:
                found.append((name, tensor.shape, tensor.dtype, tensor.requires_grad))
                self.holders[id(tensor)] += 1
                self.originals[id(tensor)] = tensor
        for name, tensor in own["_buffers"].items():
            if tensor is not None:
                found.append((name, tensor.shape, tensor.dtype, tensor.requires_grad))
                self.originals[id(tensor)] = tensor
        return tuple(found)

    def blocks(self) -> dict[str, Found]:
        """The outermost modules that occur often enough, by path."""
        counts = Counter(self.prints.values())
        sizes = dict(self.known.values())
        often = {k for k, size in sizes.items() if counts[k] >= FEWEST and size >= FEWEST}
        shared = {key for key, count in self.holders.items() if count > 1}
        found = dict(self._outermost(self.model, "", often, shared))
        kinds = Counter(block.kind for block in found.values())
        return {path: block for path, block in found.items() if kinds[block.kind] >= FEWEST}

    def _outermost(
        self, module: nn.Module, path: str, often: set[int], shared: set[int]
    ) -> Iterator[tuple[str, Found]]:
        for name, child in module._modules.items():
            if child is None:
                continue
            inner = f"{path}.{name}" if path else name
            kind = self.prints[id(child)]
            if kind in often and self._is_block(child, shared):
                yield inner, Found(child, kind)
            else:
                yield from self._outermost(child, inner, often, shared)

    def _is_block(self, module: nn.Module, shared: set[int]) -> bool:
        if isinstance(module, nn.ModuleList | nn.ModuleDict) or id(module) in self.hooked:
            return False
        return not shared or not any(id(p) in shared for p in module.parameters())


Answer = Callable[[str, Any, Any], Any]  # of a block's path and arguments


class UnfoldableError(Exception):
    """The replicas cannot be proven to be what was traced; the message says why."""


@dataclass(slots=True)
class Hollow:
    """A copy of a model without data, with shells in place of its repeated blocks."""

    model: nn.Module
    blocks: dict[str, Found]  # path -> the block itself, never to be run unless it is a copy
    twins: Twins | None  # None: the blocks are copies already
    is_switched: bool = False  # the model was not in training mode, its copy is
    answer: Answer | None = None
    copied: dict[str, nn.Module] = field(default_factory=dict)

    @contextmanager
    def answering(self, answer: Answer) -> Iterator[None]:
        """Let `answer` speak for the blocks."""
        before, self.answer = self.answer, answer
        try:
            yield
        finally:
            self.answer = before

    def copy(self, path: str) -> nn.Module:
        """A copy of a block, to be run."""
        if self.twins is None:
            return self.blocks[path].module
        if path not in self.copied:
            # Whoever is recording or tracing the model must not see it.
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                copied = self.twins.make(self.blocks[path].module)
                self.copied[path] = copied.train() if self.is_switched else copied
        return self.copied[path]

    def call(self, path: str, args: Any, kwargs: Any) -> Any:
        """What a shell does when it is called."""
        assert self.answer is not None
        return self.answer(path, args, kwargs)

    def attribute(self, path: str, name: str) -> Any:
        """What a shell lacks; whoever wants a part of the block gets no shell."""
        found = getattr(self.copy(path), name)
        if isinstance(found, nn.Module | torch.Tensor):
            raise UnfoldableError(f"{path}.{name} is used from outside its block")
        return found


def hollow(
    model: nn.Module, dtype: str | None, loss: Callable[[Any], Any] | None = None
) -> Hollow | None:
    """A copy of `model` with shells for its repeated blocks; None where nothing repeats."""
    survey = Survey(model)
    blocks = survey.blocks()
    if not blocks:
        return None
    is_plain = not any(map(copies_itself, survey.classes))
    if is_plain and not any(id(block.module) in survey.wilful for block in blocks.values()):
        try:
            kept = {**survey.originals, **functions_of(model.modules())}
            return _around(model, blocks, Twins(kept, dtype), loss)
        except _InsideError:
            pass
    copied = skeleton(model, dtype)
    blocks = {p: Found(copied.get_submodule(p), block.kind) for p, block in blocks.items()}
    return _around(copied, blocks, None, loss)


def _around(
    model: nn.Module,
    blocks: dict[str, Found],
    twins: Twins | None,
    loss: Callable[[Any], Any] | None,
) -> Hollow:
    """The model's copy with shells; without twins, the model is a copy itself."""
    prefix = "" if loss is None else "model."  # as a part of `WithLoss`
    named = {prefix + path: block for path, block in blocks.items()}
    found = Hollow(model, named, twins, not model.training)
    classes = {cls: _shell_class(cls) for cls in {type(b.module) for b in blocks.values()}}
    shells = {
        path: _shell(found, prefix + path, block.module, classes[type(block.module)])
        for path, block in blocks.items()
    }
    if twins is not None:
        twins.update({id(block.module): shells[path] for path, block in blocks.items()})
        model = _copied(model, twins, list(shells.values()))
    else:
        for path, shell in shells.items():
            parent, _, name = path.rpartition(".")
            model.get_submodule(parent)._modules[name] = shell
    found.model = model if loss is None else WithLoss(model, loss)
    return found


def _copied(model: nn.Module, twins: Twins, shells: list[nn.Module]) -> nn.Module:
    """A copy for training, in which the shells that `twins` knows stand for the blocks."""
    sealed = _Sealed()
    for shell in shells:
        vars(shell)["_modules"] = sealed
    copied = for_training(twins.make(model))
    for shell in shells:
        vars(shell)["_modules"] = {}
    if not model.training and not all(shell.training for shell in shells):
        raise _InsideError
    return copied


class _InsideError(Exception):
    """The model's own way to training mode does something to its blocks."""


class _Sealed(dict[str, nn.Module]):
    """The children of a shell while the model is put into training mode: nobody may look."""

    def _refuse(self, *args: Any) -> Any:
        raise _InsideError

    __iter__ = __len__ = __getitem__ = __contains__ = get = keys = values = items = _refuse


def _shell(owner: Hollow, path: str, block: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """An object that looks like `block` from outside."""
    shell: nn.Module = object.__new__(cls)
    own = vars(shell)
    for name, value in vars(block).items():
        if isinstance(value, UNCHANGING):
            own[name] = value
        elif type(value) in EMPTY and not value:
            own[name] = type(value)()
    own.update(_parameters={}, _buffers={}, _modules={}, _non_persistent_buffers_set=set())
    own["_shell_of"] = (owner, path)
    own["forward"] = lambda *args, **kwargs: owner.call(path, args, kwargs)
    return shell


def _shell_class(cls: type[nn.Module]) -> type[nn.Module]:
    def otherwise(self: nn.Module, name: str) -> Any:
        owner, path = vars(self)["_shell_of"]
        return owner.attribute(path, name)

    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        vars(self)["training"] = mode
        return self

    own = {"__getattr__": otherwise, "train": train, "__module__": cls.__module__}
    shell: type[nn.Module] = type(cls.__name__, (Unseen, cls), own)
    return shell


HEAD, TAIL = 3, 2  # periods of a run that are kept at its beginning and at its end
KEPT = HEAD + TAIL
LONGEST_PERIOD = 8
FEWEST_PERIODS = 7


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of `count` periods of `period` blocks, from the `first`-th block call on."""

    first: int
    period: int
    count: int
    paths: tuple[tuple[str, ...], ...]  # per period, the paths of its blocks

    @property
    def removed(self) -> tuple[str, ...]:
        """The blocks to take out."""
        return tuple(path for paths in self.paths[HEAD : self.count - TAIL] for path in paths)


def find_runs(log: Log) -> list[Run]:
    """The runs of a full model whose periods are proven alike."""
    runs = []
    at = 0
    while at < len(log.blocks):
        run = _longest(log, at)
        if run is None:
            at += 1
        else:
            at = run.first + run.period * run.count
            if _is_periodic(log, run):
                runs.append(run)
    return runs


def _longest(log: Log, first: int) -> Run | None:
    """The run from block `first` on that covers most blocks, the shortest period preferred."""
    kinds = [behaviour for _, behaviour, _ in log.blocks[first:]]
    best: Run | None = None
    for period in range(1, LONGEST_PERIOD + 1):
        length = period
        while length < len(kinds) and kinds[length] == kinds[length - period]:
            length += 1
        count = length // period
        if count >= FEWEST_PERIODS and (best is None or count * period > best.count * best.period):
            paths = [path for _, _, path in log.blocks[first : first + count * period]]
            grouped = (tuple(paths[k * period : (k + 1) * period]) for k in range(count))
            best = Run(first, period, count, tuple(grouped))
    return best


def _ends(log: Log, run: Run) -> list[int]:
    """The event index just after each period."""
    last = [run.first + (k + 1) * run.period - 1 for k in range(run.count)]
    return [log.blocks[block][0] + 1 for block in last]


def _is_periodic(log: Log, run: Run) -> bool:
    """Whether every period from the second on does the same as the one before it."""
    start = log.blocks[run.first][0]
    bounds = [start, *_ends(log, run)]
    encoded = [
        _relative(log.events, bounds[k], bounds[k + 1], bounds[k - 1], start)
        for k in range(1, run.count)
    ]
    return encoded[0] is not None and all(each == encoded[0] for each in encoded)


def _relative(
    events: Sequence[Event], low: int, high: int, before: int, start: int
) -> list[Event] | None:
    """The events of a period, tensors counted from its beginning; None if it reaches elsewhere.

    It may read its own tensors, those of the period before, and those from before the run.
    """
    found = []
    for event in events[low:high]:
        arguments = []
        for argument in event.arguments:
            if isinstance(argument, Ref) and argument.index >= start:
                if argument.index < before:
                    return None
                argument = ("near", argument.index - low, argument.output)
            arguments.append(argument)
        found.append(replace(event, arguments=tuple(arguments)))
    return found


def shortened(log: Log, runs: Sequence[Run]) -> list[Event] | None:
    """The events that remain without the removed periods; None if one of them is read later."""
    gone: dict[int, int | None] = {}  # removed event -> the kept one that stands for it
    for run in runs:
        ends = _ends(log, run)
        low, high = ends[HEAD - 1], ends[run.count - TAIL - 1]
        last = ends[run.count - TAIL - 2]
        for index in range(low, high):
            gone[index] = index - last + ends[HEAD - 2] if index >= last else None
    number: dict[int, int] = {}
    kept: list[Event] = []
    for index, event in enumerate(log.events):
        if index in gone:
            continue
        arguments = []
        for argument in event.arguments:
            if isinstance(argument, Ref):
                source = gone.get(argument.index, argument.index)
                if source is None:
                    return None
                argument = Ref(number[source], argument.output)
            arguments.append(argument)
        number[index] = len(kept)
        kept.append(replace(event, arguments=tuple(arguments)))
    return kept


@contextmanager
def without_removed(model: nn.Module, removed: Iterable[str]) -> Iterator[None]:
    """The model without the blocks at the given paths; its containers are restored afterwards."""
    names: dict[str, list[str]] = {}
    for path in removed:
        parent, _, name = path.rpartition(".")
        names.setdefault(parent, []).append(name)
    containers = {parent: model.get_submodule(parent)._modules for parent in names}
    before = {parent: dict(modules) for parent, modules in containers.items()}
    for parent, modules in containers.items():
        for name in names[parent]:
            del modules[name]
    try:
        yield
    finally:
        for parent, modules in containers.items():
            modules.clear()
            modules.update(before[parent])
