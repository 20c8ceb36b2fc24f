"""Blocks that a module tree repeats, found by structure and not by name.

A block is a module with children of its own whose fingerprint (class, children, shapes and
dtypes of parameters and buffers) occurs at least three times. The outermost such modules are
taken: the layers of a Transformer, the bottlenecks of a ResNet, the branches of an Inception
module. A module with hooks, or with a parameter that is used outside it too, is never one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

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
