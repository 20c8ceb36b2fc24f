"""A captured graph together with what running it needs: the calls, and where tensors come from.

Where in a batch each input of a graph lies, in words that a plan can keep.

A block converted once, and copied wherever the block stands.

A template is a small graph with open inputs. Its tensors are numbered from 0; a copy renumbers
them, puts the given tensors for the inputs, and prefixes names with the block's path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.export._tree_utils import reorder_kwargs
from torch.utils import _pytree as pytree

from shardfold.graph import Graph, Op, Operand, Origin, Tensor


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
    fixed: Mapping[int, Any] = field(default_factory=dict)  # leaves that are no tensors
    increments: Mapping[str, float] = field(default_factory=dict)  # what a step adds to buffers
    results: Mapping[str, int] = field(default_factory=dict)  # what forward returns, by its keys


def places_of(
    program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> dict[int, str]:
    """For every input of the graph its place: `0`, `input_ids`, `batch.image`."""
    ordered = reorder_kwargs(dict(kwargs or {}), program.in_spec)
    leaves = pytree.tree_flatten_with_path((tuple(args), ordered))[0]
    paths = [".".join(str(key_of(key)) for key in path[1:]) for path, _ in leaves]
    sources = program.sources.items()
    return {tensor: paths[source.leaf] for tensor, source in sources if source.role == "input"}


def key_of(key: Any) -> Any:
    """What a step down a structure is named: an index, a key or a field."""
    for name in ("idx", "key", "name"):
        if hasattr(key, name):
            return getattr(key, name)
    return key


@dataclass(frozen=True, slots=True)
class Template:
    """The operators of a block, and which of its tensors are given and returned."""

    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    calls: tuple[Invocation, ...]
    sources: dict[int, Source]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    increments: dict[str, float]  # of buffers, by name

    def copy(
        self,
        given: list[int],
        path: str,
        tensors: list[Tensor],
        ops: list[Op],
        calls: list[Invocation],
        sources: dict[int, Source],
    ) -> list[int]:
        """Append a copy of the block to a graph under construction; returns its outputs."""
        number = dict(zip(self.inputs, given, strict=True))
        for index, tensor in enumerate(self.tensors):
            if index in number:
                continue
            number[index] = len(tensors)
            tensors.append(replace(tensor, names=tuple(f"{path}.{n}" for n in tensor.names)))
            if index in self.sources:
                source = self.sources[index]
                sources[number[index]] = replace(source, name=f"{path}.{source.name}")
        for op in self.ops:
            ops.append(
                Op(
                    f"{path}.{op.name}",
                    op.kind,
                    tuple(Operand(o.name, number[o.tensor]) for o in op.operands),
                    tuple(number[r] for r in op.results),
                    op.attributes,
                    Origin(".".join(filter(None, (path, op.origin.module))), op.origin.source),
                )
            )
        calls.extend(self.calls)
        return [number[i] for i in self.outputs]
