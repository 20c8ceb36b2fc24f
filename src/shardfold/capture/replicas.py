"""Trace each distinct block once: the model around its blocks, and every kind of block alone.

Three passes over a meta copy of the model:

1. The model is run on meta tensors. The first block of each behaviour runs for real while the
   attributes it reads are noted; each later one that agrees on them, and is called with the same
   kinds of arguments, is a replica and returns empty tensors of the known types.
2. The model is exported with every block as one opaque operator, so whatever the surrounding
   code does between and around blocks, at whatever index, is traced for real.
3. Each behaviour's first block is exported alone, and put in place of the opaque operators.

The result is the graph that a full trace gives, operator for operator. Where anything does not
hold (other arguments in pass 2 than in pass 1, a block that writes into its input or reads more
than it first did), `Unfoldable` says what, and the caller traces in full.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardfold.capture.call_log import (
    PLAIN,
    Event,
    Footprint,
    Log,
    Reads,
    Recorder,
    agree,
    changed,
    footprints,
    modules_of,
    recording,
    state_of,
)
from shardfold.capture.export import Traced, export
from shardfold.capture.guards import watching
from shardfold.capture.repeated_blocks import (
    Hollow,
    Run,
    UnfoldableError,
    find_runs,
    shortened,
    without_removed,
)
from shardfold.capture.user_code import State
from shardfold.errors import ModelError


@dataclass(frozen=True, slots=True)
class Signature:
    """How a block is called: structure, types of tensors, values of everything else."""

    spec: Any
    leaves: tuple[Any, ...]


@dataclass(slots=True)
class Behaviour:
    """Blocks that run the same code on the same kinds of arguments."""

    path: str  # of the first block
    signature: Signature
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    reads: Reads
    prints: list[Footprint]  # what was read, as the first block has it
    changed: frozenset[tuple[int, str]]  # attributes whose objects the block writes into
    outputs: list[Any]  # a meta tensor, a plain value, or a Passed
    out_spec: Any
    replicas: list[str] = field(default_factory=list)  # their paths


@dataclass(frozen=True, slots=True)
class Passed:
    """An output that is the argument at `position` itself."""

    position: int


@dataclass(frozen=True, slots=True)
class BlockCall:
    """One opaque operator of the exported model: which behaviour, at which path."""

    behaviour: int
    path: str


@dataclass(frozen=True, slots=True)
class Block:
    """A distinct block, exported alone; `made` are the positions of the outputs that it makes."""

    traced: Traced
    path: str
    made: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Folded:
    """The model around its blocks, each distinct block, and which block stands where."""

    outer: Traced
    blocks: tuple[Block, ...]
    calls: tuple[BlockCall, ...]

    def __str__(self) -> str:
        return f"{len(self.blocks)} distinct of {len(self.calls)} repeated blocks traced"


def fold(model: Hollow, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Folded | None:
    """Export a model with repeated blocks traced once; None where too few are replicas."""
    folding = _Folding(model, set(model.blocks))
    folding.discover(args, kwargs)
    return folding.finish(args, kwargs)


def fold_short(
    model: Hollow, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Folded | None, tuple[Run, ...]]:
    """As `fold`, with only a few periods of each long run; the runs say what stands for what."""
    folding = _Folding(model, set(model.blocks))
    log = folding.discover(args, kwargs)
    runs = find_runs(log)
    expected = shortened(log, runs) if runs else None
    if expected is None:
        return folding.finish(args, kwargs), ()
    removed = {path for run in runs for path in run.removed}
    with without_removed(model.model, removed):
        short = _Folding(model, set(model.blocks) - removed)
        if _same_as(short, folding, expected, args, kwargs):
            return short.finish(args, kwargs), tuple(runs)
    return folding.finish(args, kwargs), ()


def _same_as(
    short: _Folding, full: _Folding, expected: list[Event], args: Any, kwargs: Any
) -> bool:
    """Whether the short model does what the full one does without the removed periods."""
    try:
        log = short.discover(args, kwargs)
    except UnfoldableError:
        return False
    if log.events != expected or len(short.behaviours) != len(full.behaviours):
        return False
    for ours, theirs in zip(short.behaviours, full.behaviours, strict=True):
        if not ours.reads <= theirs.reads:  # what was checked at full depth must cover them
            return False
        ours.replicas, ours.reads = theirs.replicas, theirs.reads
    short.modules.update(full.modules)
    return True


# The outputs of each opaque call, while a model is being exported: fake implementations look here.
_outputs: dict[int, list[torch.Tensor]] = {}


@torch.library.custom_op("shardfold::block", mutates_args=())
def _block(inputs: list[torch.Tensor], call: int) -> list[torch.Tensor]:
    raise RuntimeError("shardfold::block stands for a traced block and cannot be run.")


@_block.register_fake
def _(inputs: list[torch.Tensor], call: int) -> list[torch.Tensor]:
    return [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
        for t in _outputs[call]
    ]


@dataclass(slots=True)
class _Folding:
    hollow: Hollow
    paths: set[str]  # of the blocks that the model has now
    behaviours: list[Behaviour] = field(default_factory=list)
    by_kind: dict[Any, list[int]] = field(default_factory=dict)
    calls: list[BlockCall] = field(default_factory=list)
    log: Log = field(default_factory=Log)
    modules: dict[str, list[nn.Module]] = field(default_factory=dict)  # of each block

    def discover(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Log:
        """Pass 1 by itself: what the model does around its blocks."""
        self.log = Log.of(self.hollow.model, args, kwargs)
        model = self.hollow.model
        with self.hollow.answering(self._discover), _as_if_exporting(), Recorder(self.log):
            try:
                with watching(model) as watch:
                    model(*args, **kwargs)
            except UnfoldableError:
                raise
            except Exception as error:
                raise UnfoldableError(f"the model does not run on meta tensors: {error}") from error
        _check_steady("the model", watch.before, watch.after)
        unused = self.paths - self.log.paths
        if unused:
            raise UnfoldableError(f"{min(unused)} is never called")
        return self.log

    def finish(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Folded | None:
        """Passes 2 and 3, after pass 1."""
        if sum(len(b.replicas) for b in self.behaviours) < FEWEST_REPLICAS:
            return None
        blocks = tuple(self._export(behaviour) for behaviour in self.behaviours)
        self.calls.clear()
        with self.hollow.answering(self._emit):
            try:
                outer = export(self.hollow.model, args, kwargs)
            except ModelError as error:
                raise UnfoldableError(
                    f"the model around its blocks: {error.__cause__ or error}"
                ) from error
            finally:
                _outputs.clear()
        if any(traced.has_gradients for traced in (outer, *(b.traced for b in blocks))):
            raise UnfoldableError("forward asks for a gradient, which goes through all blocks")
        return Folded(outer, blocks, tuple(self.calls))

    def _discover(self, path: str, args: Any, kwargs: Any) -> Any:
        """Pass 1: run the first block of each behaviour, answer for its replicas."""
        if path in self.log.paths:
            raise UnfoldableError(f"{path} is called more than once")
        with self.log.paused(), torch._C.DisableTorchFunction():
            leaves, spec = pytree.tree_flatten((args, kwargs))
            signature = _signature(leaves, spec, path)
            known = self._find(path, signature)
        if known is None:
            known = self._first(path, signature, leaves, (args, kwargs))
        known.replicas.append(path)
        with torch._C.DisableTorchFunction():
            made = [_detached(o) if isinstance(o, torch.Tensor) else o for o in known.outputs]
            self.log.block(self.behaviours.index(known), path, leaves, made)
        return _rebuild(made, known.out_spec, leaves)

    def _first(
        self, path: str, signature: Signature, leaves: list[Any], arguments: Any
    ) -> Behaviour:
        """Run a block, and note what it reads."""
        block = self.hollow.copy(path)
        inside = modules_of(block)
        before, attributes = state_of(inside), State.of(block)
        with recording(block) as reads, self.log.paused():
            result = block(*arguments[0], **arguments[1])
        _check_steady(path, attributes, State.of(block))
        flat, out_spec = pytree.tree_flatten(result)
        with self.log.paused():
            outputs = [_output(value, leaves, path) for value in flat]
            empty = pytree.tree_map_only(torch.Tensor, _detached, arguments)
        prints, written = footprints(self._modules(path), reads), changed(before, inside)
        found = Behaviour(path, signature, empty, reads, prints, written, outputs, out_spec)
        self.by_kind.setdefault(self.hollow.blocks[path].kind, []).append(len(self.behaviours))
        self.behaviours.append(found)
        return found

    def _find(self, path: str, signature: Signature) -> Behaviour | None:
        for index in self.by_kind.get(self.hollow.blocks[path].kind, ()):
            known = self.behaviours[index]
            if known.signature == signature and self._agree(known, path, known.prints):
                return known
        return None

    def _agree(self, known: Behaviour, path: str, prints: list[Footprint]) -> bool:
        """Whether a block agrees with the one that was run, in what that one read."""
        mine, first = self._modules(path), self._modules(known.path)
        for position, name in known.changed if path != known.path else ():
            if vars(mine[position]).get(name) is vars(first[position]).get(name):
                raise UnfoldableError(f"{path} shares its {name}, which blocks write into")
        return agree(prints, mine)

    def _modules(self, path: str) -> list[nn.Module]:
        """The modules of a block, by position."""
        if path not in self.modules:
            self.modules[path] = modules_of(self.hollow.blocks[path].module)
        return self.modules[path]

    def _emit(self, path: str, args: Any, kwargs: Any) -> Any:
        """Pass 2: one opaque operator a block."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        known = self._find(path, _signature(leaves, spec, path))
        if known is None:
            raise UnfoldableError(f"{path} is called otherwise when it is exported")
        call = len(self.calls)
        self.calls.append(BlockCall(self.behaviours.index(known), path))
        _outputs[call] = [o for o in known.outputs if isinstance(o, torch.Tensor)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        made = iter(torch.ops.shardfold.block(tensors, call))
        filled = [next(made) if isinstance(o, torch.Tensor) else o for o in known.outputs]
        return _rebuild(filled, known.out_spec, leaves)

    def _export(self, behaviour: Behaviour) -> Block:
        """Pass 3: one block alone; what it reads now must agree among its replicas, too."""
        block = self.hollow.copy(behaviour.path)
        with recording(block) as reads:
            try:
                traced = export(block, *behaviour.arguments)
            except ModelError as error:
                raise UnfoldableError(
                    f"{behaviour.path} alone: {error.__cause__ or error}"
                ) from error
        prints = footprints(self._modules(behaviour.path), reads - behaviour.reads)
        for replica in behaviour.replicas if prints else ():
            if not self._agree(behaviour, replica, prints):
                raise UnfoldableError(f"blocks like {behaviour.path} differ in what they read")
        made = [k for k, o in enumerate(behaviour.outputs) if isinstance(o, torch.Tensor)]
        return Block(traced, behaviour.path, tuple(made))


FEWEST_REPLICAS = 3


def _check_steady(path: str, before: State, after: State) -> None:
    """Python attributes that forward changes forbid that one block stands for another."""
    for _, name in before.changed(after):
        raise UnfoldableError(f"{path} and others may write into {name}, an attribute")


def _signature(leaves: list[Any], spec: Any, path: str) -> Signature:
    """How a block is called; an argument with a state of its own (a cache) forbids folding."""
    seen: dict[int, int] = {}
    found: list[Any] = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            first = seen.setdefault(id(leaf), position)
            found.append((first, tuple(leaf.shape), leaf.stride(), leaf.dtype))
        elif isinstance(leaf, PLAIN):
            found.append((type(leaf), leaf))
        else:
            raise UnfoldableError(f"{path} is given a {type(leaf).__name__}")
    return Signature(spec, tuple(found))


def _output(value: Any, leaves: list[Any], path: str) -> Any:
    for position, leaf in enumerate(leaves):
        if isinstance(value, torch.Tensor) and value is leaf:
            return Passed(position)
    if isinstance(value, torch.Tensor):
        return _detached(value)
    if isinstance(value, PLAIN):
        return value
    raise UnfoldableError(f"{path} returns a {type(value).__name__}")


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def _rebuild(outputs: list[Any], spec: Any, leaves: list[Any]) -> Any:
    filled = [leaves[o.position] if isinstance(o, Passed) else o for o in outputs]
    return pytree.tree_unflatten(filled, spec)


def has_global_hooks() -> bool:
    """Whether hooks run on every module, so that none can be stood for."""
    from torch.nn.modules import module

    return bool(module._global_forward_hooks or module._global_forward_pre_hooks)


@contextmanager
def _as_if_exporting() -> Iterator[None]:
    """Models that ask whether they are exported must take the same way in pass 1 as in pass 2."""
    before = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = before
