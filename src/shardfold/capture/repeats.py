"""Blocks that a module tree repeats, found by structure and not by name.

A block is a module with children of its own whose fingerprint (class, children, shapes and
dtypes of parameters and buffers) occurs at least three times. The outermost such modules are
taken: the layers of a Transformer, the bottlenecks of a ResNet, the branches of an Inception
module. A module with hooks, or with a parameter that is used outside it too, is never one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

FEWEST = 3
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def repeated_blocks(model: nn.Module) -> dict[str, Any]:
    """Path -> fingerprint of every block to be traced once for all of its kind."""
    prints: dict[int, Any] = {}
    _fingerprint(model, prints)
    counts = Counter(prints.values())
    shared = _shared_parameters(model)
    found = dict(_outermost(model, "", prints, counts, shared))
    kinds = Counter(found.values())
    return {path: kind for path, kind in found.items() if kinds[kind] >= FEWEST}


def _fingerprint(module: nn.Module, prints: dict[int, Any]) -> Any:
    """A hashable description; equal ones are interned, so comparing them is comparing ids."""
    children = tuple((name, _fingerprint(m, prints)) for name, m in module._modules.items() if m)
    tensors = tuple(
        (name, tuple(t.shape), t.dtype, t.requires_grad)
        for table in (module._parameters, module._buffers)
        for name, t in table.items()
        if t is not None
    )
    found = hash((type(module), children, tensors))
    prints[id(module)] = found
    return found


def _outermost(
    module: nn.Module,
    path: str,
    prints: dict[int, Any],
    counts: Counter[Any],
    shared: set[int],
) -> Iterator[tuple[str, Any]]:
    for name, child in module._modules.items():
        if child is None:
            continue
        inner = f"{path}.{name}" if path else name
        fingerprint = prints[id(child)]
        if counts[fingerprint] >= FEWEST and _is_block(child, shared):
            yield inner, fingerprint
        else:
            yield from _outermost(child, inner, prints, counts, shared)


def _is_block(module: nn.Module, shared: set[int]) -> bool:
    inside = list(module.modules())
    if len(inside) < 3 or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    if any(getattr(m, hooks, None) for m in inside for hooks in HOOKS):
        return False
    return not any(id(p) in shared for p in module.parameters())


def _shared_parameters(model: nn.Module) -> set[int]:
    """Parameters that more than one module holds, or that sit in a module used twice."""
    seen: Counter[int] = Counter()
    for _, module in model.named_modules(remove_duplicate=False):
        seen.update(id(p) for p in module._parameters.values() if p is not None)
    return {key for key, count in seen.items() if count > 1}
