"""The steps of an operator under each of its configurations, forward and backward."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardfold.cluster import Mesh
from shardfold.costs.steps import (
    Collective,
    Compute,
    Phase,
    Step,
    Steps,
    Values,
    by_axes,
    recomputed,
)
from shardfold.graph import Graph, TensorType
from shardfold.spaces import Atoms, Exchange, Space
from shardfold.spaces.layout import forward_states, local_items


@dataclass(frozen=True, slots=True)
class Tensors:
    """What an operator's steps depend on besides its space: the types of its tensors."""

    inputs: tuple[TensorType, ...]
    input_atoms: tuple[tuple[int, ...], ...]
    input_grads: tuple[bool, ...]
    results: tuple[TensorType, ...]
    result_atoms: tuple[tuple[int, ...], ...]
    result_grads: tuple[bool, ...]

    @classmethod
    def of(cls, graph: Graph, atoms: Atoms, index: int) -> Tensors:
        """The tensors of the operator at `index`."""
        op, take = graph.ops[index], graph.tensors
        return cls(
            tuple(take[t].type for t in op.inputs),
            tuple(atoms.tensors[t] for t in op.inputs),
            tuple(take[t].requires_grad for t in op.inputs),
            tuple(take[t].type for t in op.results),
            tuple(atoms.tensors[t] for t in op.results),
            tuple(take[t].requires_grad for t in op.results),
        )


def operator_steps(space: Space, tensors: Tensors, mesh: Mesh, again: bool = False) -> Steps:
    """Local work and inner collectives of every configuration; forward twice if it runs `again`."""
    rule = space.rule.rule
    local = local_factors(space, mesh)
    steps: list[Step] = []
    if rule.engine != "none":
        flops = rule.flops * _points(space, local, mesh)
        moved = operand_bytes(space, tensors, mesh) + result_bytes(space, tensors, mesh)
        steps.append(_compute(space, tensors, "forward", 1.0, flops, moved))
    steps.extend(_exchanges(space, tensors, local, mesh, "forward"))
    if again:
        steps.extend(recomputed(Steps(len(space.configs), tuple(steps))).steps)
    if any(tensors.result_grads):
        steps.extend(_exchanges(space, tensors, local, mesh, "backward"))
        times = rule.backward if rule.backward is not None else float(sum(tensors.input_grads))
        if rule.engine != "none" and times:
            steps.append(_compute(space, tensors, "backward", times, flops, moved))
    return Steps(len(space.configs), tuple(steps))


def local_factors(space: Space, mesh: Mesh) -> NDArray[np.int64]:
    """For each configuration and factor, the points of the fullest device."""
    sizes = np.asarray(space.rule.sizes, dtype=np.int64)
    local: NDArray[np.int64] = -(-sizes // space.parts(mesh.shape))
    return local


def operand_bytes(space: Space, tensors: Tensors, mesh: Mesh) -> Values:
    """Bytes that each configuration reads; of a table that is looked up, only the rows read."""
    total = np.zeros(len(space.configs))
    for k, (kind, atoms) in enumerate(zip(tensors.inputs, tensors.input_atoms, strict=True)):
        if k not in space.rule.rule.sparse:
            total += operand_local_bytes(space, k, kind, atoms, mesh)
    if space.rule.rule.sparse:
        total += result_bytes(space, tensors, mesh)
    return total


def operand_local_bytes(
    space: Space, position: int, kind: TensorType, atoms: tuple[int, ...], mesh: Mesh
) -> Values:
    """Bytes of one operand on the fullest device, for each configuration."""
    layouts = forward_states(space.operand_layouts(position))
    return local_items(layouts, atoms, mesh.shape) * kind.item_bytes


def result_bytes(space: Space, tensors: Tensors, mesh: Mesh) -> Values:
    """Bytes that each configuration writes."""
    total = np.zeros(len(space.configs))
    for k, (kind, atoms) in enumerate(zip(tensors.results, tensors.result_atoms, strict=True)):
        layouts = space.result_layouts(k)
        total += local_items(layouts, atoms, mesh.shape) * kind.item_bytes
    return total


def _compute(
    space: Space, tensors: Tensors, phase: Phase, times: float, flops: Values, moved: Values
) -> Compute:
    floating = [kind.dtype for kind in (*tensors.inputs, *tensors.results) if kind.is_floating]
    dtype = floating[0] if floating else "float32"
    kernels = 1 if phase == "forward" else max(1, sum(tensors.input_grads))
    return Compute(phase, space.rule.rule.engine, dtype, times * flops, times * moved, kernels)


def _points(space: Space, local: NDArray[np.int64], mesh: Mesh) -> Values:
    """Points of work on the fullest device.

    A causal factor in n parts is skewed: the last part attends to almost everything, so it does
    (2n - 1)/n**2 of the work instead of 1/n.
    """
    rule = space.rule.rule
    parts = space.parts(mesh.shape)
    total = np.ones(len(space.configs))
    for i in range(len(space.rule.factors)):
        base = space.rule.base(i)
        if base in rule.work_factors:
            total *= local[:, i]
        if base in rule.skewed:
            total *= (2.0 * parts[:, i] - 1.0) / parts[:, i]
    return total


def _exchanges(
    space: Space, tensors: Tensors, local: NDArray[np.int64], mesh: Mesh, phase: Phase
) -> list[Collective]:
    """The exchanges of one pass; one that serves a gradient that nobody asks for is not made."""
    steps = []
    for exchange in space.rule.rule.exchanges:
        wanted = exchange.of is None or tensors.input_grads[exchange.of]
        if exchange.phase == phase and wanted:
            steps.extend(_exchange(space, exchange, local, mesh, phase))
    return steps


def _exchange(
    space: Space, exchange: Exchange, local: NDArray[np.int64], mesh: Mesh, phase: Phase
) -> list[Collective]:
    """The collectives of one exchange, grouped by the axes that split its factor.

    What is gathered, or reduced and scattered, is as large as all devices' parts together.
    """
    members = [i for i in range(len(space.rule.factors)) if space.rule.base(i) == exchange.factor]
    splits = np.isin(space.configs, members)
    masks = splits.astype(np.int64) @ (1 << np.arange(len(mesh.axes), dtype=np.int64))
    over = [i for i in range(len(space.rule.factors)) if space.rule.base(i) in exchange.over]
    points = local[:, over].astype(float)
    for base, more in exchange.longer:
        own = [i for i, factor in enumerate(over) if space.rule.base(factor) == base]
        points[:, own] += more * (space.parts(mesh.shape)[:, over][:, own] > 1)
    sizes = exchange.words * exchange.item_bytes * np.prod(points, axis=1)
    joins = exchange.kind in ("all_gather", "reduce_scatter")
    found = []
    for axes, rows in by_axes(masks, len(mesh.axes)):
        together = math.prod(mesh.axes[a].size for a in axes) if joins else 1
        size = sizes[rows] * together
        found.append(Collective(phase, exchange.kind, axes, rows, size, exchange.repeats))
    return found
