"""Runs a captured graph on real tensors, operator by operator: what was captured is what is run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.graph import Graph, Op

MEMORY_FORMATS = ("preserve_format", "contiguous_format", "channels_last", "channels_last_3d")


def loss_of(
    graph: Graph, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """The graph's loss with the module's own parameters and buffers, on these inputs."""
    return run(graph, leaves(graph, module, args, kwargs))[graph.loss]


def leaves(
    graph: Graph, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, Tensor]:
    """The tensors that no operator writes, by index."""
    given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    known: dict[str, Any] = {**module.state_dict(keep_vars=True), **dict(module.named_buffers())}
    known |= {name: value for name, value in given.items() if isinstance(value, Tensor)}
    for name, value in given.items():
        if isinstance(value, Mapping):
            known |= {str(k): v for k, v in value.items()}
        if isinstance(value, tuple):
            known |= {f"{name}_{k}": v for k, v in enumerate(value)}
    return {i: known[t.name] for i, t in enumerate(graph.tensors) if t.role != "activation"}


def run(graph: Graph, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Every tensor of the graph; gradients flow only where the graph says that they do."""
    known = dict(values)
    for op in graph.ops:
        found = call(op, [known[t] for t in op.inputs])
        for index, result in zip(op.results, found, strict=True):
            known[index] = result if graph.tensors[index].requires_grad else result.detach()
    return known


def call(op: Op, operands: list[Tensor], **changed: Any) -> list[Tensor]:
    """The results of one operator; `changed` replaces attributes."""
    if op.kind == "aten.copy":  # torch has no derivative for the functional form
        return [operands[1].to(operands[0].dtype).expand_as(operands[0]).clone()]
    space, name = op.kind.split(".")
    arguments = {k: decoded(k, v) for k, v in (op.attributes | changed).items()}
    for operand, value in zip(op.operands, operands, strict=True):
        base, bracket, at = operand.name.partition("[")
        if not bracket:
            arguments[base] = value
            continue
        items = list(arguments.get(base) or [])
        number = int(at[:-1])
        items += [None] * (number + 1 - len(items))
        items[number] = value
        arguments[base] = items
    found = getattr(getattr(torch.ops, space), name)(**arguments)
    return [found] if isinstance(found, Tensor) else [r for r in found if isinstance(r, Tensor)]


def decoded(name: str, value: Any) -> Any:
    """An attribute as torch takes it: dtypes, devices and formats come back from their names."""
    if isinstance(value, tuple):
        return [None if v == "*" else decoded(name, v) for v in value]
    if name == "device" and value is not None:
        return torch.device("cpu")
    if name == "layout" and value is not None:
        return torch.strided
    if isinstance(value, str) and (name == "dtype" or value in MEMORY_FORMATS):
        return getattr(torch, value)
    return value
