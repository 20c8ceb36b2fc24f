"""Where in a batch each input of a graph lies, in words that a plan can keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.export._tree_utils import reorder_kwargs
from torch.utils import _pytree as pytree

from shardfold.capture.program import Program


def places_of(
    program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> dict[int, str]:
    """For every input of the graph its place: `0`, `input_ids`, `batch.image`."""
    ordered = reorder_kwargs(dict(kwargs or {}), program.in_spec)
    leaves = pytree.tree_flatten_with_path((tuple(args), ordered))[0]
    paths = [".".join(str(_key(key)) for key in path[1:]) for path, _ in leaves]
    sources = program.sources.items()
    return {tensor: paths[source.leaf] for tensor, source in sources if source.role == "input"}


def _key(key: Any) -> Any:
    """What a step down a structure is named: an index, a key or a field."""
    for name in ("idx", "key", "name"):
        if hasattr(key, name):
            return getattr(key, name)
    return key
