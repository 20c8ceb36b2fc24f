"""How modules are named where people read them: without the leading names that all paths share."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile


def shared_prefix(paths: Iterable[str]) -> int:
    """How many leading names all paths share: a wrapper's name says nothing."""
    split = [path.split(".") for path in paths if path]
    depth = 0
    while True:
        heads = {tuple(parts[: depth + 1]) for parts in split}
        inner = {parts[depth + 1] for parts in split if len(parts) > depth + 1}
        if len(heads) != 1 or not inner or any(name.isdigit() for name in inner):
            return depth
        depth += 1


def without(path: str, names: int) -> str:
    """A path without some leading names; nothing where it has no more than those.

    >>> without("model.model.layers.0.mlp", 1)
    'model.layers.0.mlp'
    """
    return ".".join(path.split(".")[names:])


def depth(path: str) -> int:
    """How many leading names may be left out: those before the last, and before any number.

    >>> depth("model.model.layers.0.mlp"), depth("model.lm_head"), depth("fc")
    (2, 1, 0)
    """
    names = list(takewhile(lambda name: not name.isdigit(), path.split(".")))
    return max(len(names) - 1, 0)
