"""A captured graph together with what running it needs: the calls, and where tensors come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from shardfold.graph import Graph


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for the operand at `position` in an invocation's arguments."""

    position: int


@dataclass(frozen=True, slots=True)
class Invocation:
    """One call of a torch operator: all arguments by schema name, tensors as slots."""

    target: Any
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor that no operator makes comes from.

    An input is a leaf of the flattened arguments; parameters and buffers have a name; a constant
    was made while the model was built or traced, and `value` holds it.
    """

    role: Literal["input", "parameter", "buffer", "constant"]
    name: str = ""
    leaf: int = -1
    value: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """A graph, the call behind each of its operators, and the sources of its tensors."""

    graph: Graph
    calls: tuple[Invocation, ...]
    sources: Mapping[int, Source]
    in_spec: Any  # the structure of the arguments, as torch's pytree describes it
