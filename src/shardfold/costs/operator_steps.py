"""The steps of an operator under each of its configurations, forward and backward.

The matrix work of a step at the device's peak rate: what utilisation is measured against.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import fsum

import numpy as np
from numpy.typing import NDArray

from shardfold.cluster import Device, Mesh
from shardfold.costs.memory_format import access_of
from shardfold.costs.steps import (
    Collective,
    Compute,
    Phase,
    Step,
    Steps,
    Values,
    by_axes,
    recompute,
)
from shardfold.graph import Graph, Precision, TensorType
from shardfold.graph.precision import OWN
from shardfold.operators import Access, Exchange, Kernel
from shardfold.operators.kernels import Fused, pointwise, reordered
from shardfold.sharding import Space, Subdims
from shardfold.sharding.layouts import forward_states, local_items

PRODUCTS = ("matmul", "bmm", "product")  # families of kernels that TF32 is for


@dataclass(frozen=True, slots=True)
class Tensors:
    """What an operator's steps depend on besides its space: the types of its tensors."""

    inputs: tuple[TensorType, ...]
    input_atoms: tuple[tuple[int, ...], ...]
    input_grads: tuple[bool, ...]
    results: tuple[TensorType, ...]
    result_atoms: tuple[tuple[int, ...], ...]
    result_grads: tuple[bool, ...]
    access: Access = field(default=Access(), compare=False)  # alike operators share a table
    precision: Precision = field(default=OWN, compare=False)  # of the whole graph

    @classmethod
    def of(cls, graph: Graph, subdims: Subdims, index: int) -> Tensors:
        """The tensors of the operator at `index`."""
        op, take = graph.ops[index], graph.tensors
        return cls(
            tuple(take[t].type for t in op.inputs),
            tuple(subdims.tensors[t] for t in op.inputs),
            tuple(take[t].requires_grad for t in op.inputs),
            tuple(take[t].type for t in op.results),
            tuple(subdims.tensors[t] for t in op.results),
            tuple(take[t].requires_grad for t in op.results),
            access_of(graph, subdims, index),
            graph.precision,
        )


def operator_steps(space: Space, tensors: Tensors, mesh: Mesh, again: bool = False) -> Steps:
    """Local work and inner collectives of every configuration; forward twice if it runs `again`."""
    rule = space.rule.rule
    local = local_factors(space, mesh)
    steps: list[Step] = []
    work = Work(space, tensors, mesh)
    flops = moved = np.zeros(len(space.configs))
    if rule.engine != "none":
        flops = rule.flops * points(space, rule.work_factors, mesh)
        moved = operand_bytes(space, tensors, mesh) + result_bytes(space, tensors, mesh)
    steps.append(_compute(work, "forward", 1.0, flops, moved))
    steps.extend(_exchanges(space, tensors, local, mesh, "forward"))
    if again:
        steps.extend(recompute(Steps(len(space.configs), tuple(steps))).steps)
    if any(tensors.result_grads):
        steps.extend(_exchanges(space, tensors, local, mesh, "backward"))
        times = rule.backward_passes(tensors.input_grads)
        if times:
            steps.append(_compute(work, "backward", times, flops, moved))
    return Steps(len(space.configs), tuple(steps))


def local_factors(space: Space, mesh: Mesh) -> NDArray[np.int64]:
    """For each configuration and factor, the points of the fullest device."""
    sizes = np.asarray(space.rule.sizes, dtype=np.int64)
    local: NDArray[np.int64] = -(-sizes // space.parts(mesh.shape))
    return local


def operand_bytes(space: Space, tensors: Tensors, mesh: Mesh) -> Values:
    """Bytes that each configuration reads; of a table that is looked up, only the rows read."""
    total = np.zeros(len(space.configs))
    for k, (kind, subdims) in enumerate(zip(tensors.inputs, tensors.input_atoms, strict=True)):
        if k not in space.rule.rule.sparse:
            total += operand_local_bytes(space, k, kind, subdims, mesh)
    if space.rule.rule.sparse:
        total += result_bytes(space, tensors, mesh)
    return total


def operand_local_bytes(
    space: Space, position: int, kind: TensorType, subdims: tuple[int, ...], mesh: Mesh
) -> Values:
    """Bytes of one operand on the fullest device, for each configuration."""
    layouts = forward_states(space.operand_layouts(position))
    return local_items(layouts, subdims, mesh.shape) * kind.item_bytes


def result_bytes(space: Space, tensors: Tensors, mesh: Mesh) -> Values:
    """Bytes that each configuration writes."""
    total = np.zeros(len(space.configs))
    for k, (kind, subdims) in enumerate(zip(tensors.results, tensors.result_atoms, strict=True)):
        layouts = space.result_layouts(k)
        total += local_items(layouts, subdims, mesh.shape) * kind.item_bytes
    return total


@dataclass(frozen=True, slots=True)
class Work:
    """An operator under each of its configurations, for a closer look: local sizes on demand."""

    space: Space
    tensors: Tensors
    mesh: Mesh

    def row(self, row: int) -> Work:
        """The operator under one configuration."""
        return replace(self, space=Space(self.space.rule, self.space.configs[row : row + 1]))

    def kernels(self, phase: str) -> list[Kernel]:
        """The kernels of one pass, and the additions of gradients to those of other readers."""
        if self.access.is_idle:
            return []
        if self.access.fused is not None:
            return self._fused(self.access.fused, phase)
        rule = self.space.rule.rule
        is_described = rule.engine != "matrix" or rule.operator.kernels is not pointwise
        found = rule.operator.kernels(self, phase) if is_described else [self._product(phase)]
        found = [self._rounded(kernel) for kernel in found]
        if self.access.is_compiled:
            found = [_padded(kernel) for kernel in found]
        if self.access.is_float8:
            found = [each for kernel in found for each in _in_float8(kernel)]
        if phase == "backward" and not self.access.is_compiled:
            found += [
                Kernel("vector", self.inputs[k].dtype, (3.0 * self.operand_bytes(k),), times)
                for k, times in enumerate(self.access.adds)
                if times
            ]
            if self.access.copies_gradient and self.trained:
                across = self.access.is_gradient_across
                found.append(reordered(self.result_bytes(0), self.dtype, across=across))
        return found

    def _fused(self, fused: Fused, phase: str) -> list[Kernel]:
        """The kernels of a group of operators, borne by this one: passes over memory."""
        moved, calls = fused.forward_bytes, fused.forward_kernels
        if phase == "backward":
            moved, calls = fused.backward_bytes, fused.backward_kernels
        if not moved:
            return []
        share = self.result_items(0) / max(1, math.prod(self.results[0].shape))
        return [Kernel("vector", self.dtype, (moved / calls * share,), calls)]

    def _rounded(self, kernel: Kernel) -> Kernel:
        """A product of float32 numbers that are rounded to TF32 runs at that rate."""
        dtype = self.tensors.precision.product(kernel.dtype)
        is_product = kernel.family.startswith(PRODUCTS)
        return replace(kernel, dtype=dtype) if is_product and dtype != kernel.dtype else kernel

    def _product(self, phase: str) -> Kernel:
        """The matrix work of an operator whose kernels are not described: so many operations."""
        rule = self.space.rule.rule
        times = rule.backward_passes(self.tensors.input_grads) if phase == "backward" else 1.0
        flops = rule.flops * points(self.space, rule.work_factors, self.mesh)
        moved = self.read_bytes() + result_bytes(self.space, self.tensors, self.mesh)
        return Kernel("product", self.dtype, (times * flops, times * moved))

    @property
    def access(self) -> Access:
        """How the operator meets memory."""
        return self.tensors.access

    @property
    def inputs(self) -> tuple[TensorType, ...]:
        """The operands, whole."""
        return self.tensors.inputs

    @property
    def results(self) -> tuple[TensorType, ...]:
        """The results, whole."""
        return self.tensors.results

    @property
    def float_dtypes(self) -> tuple[str, ...]:
        """The dtypes of operands and results that are no integers."""
        return tuple(kind.dtype for kind in (*self.inputs, *self.results) if kind.is_floating)

    @property
    def dtype(self) -> str:
        """The dtype of the first operand that is no integer."""
        return self.float_dtypes[0] if self.float_dtypes else "float32"

    @property
    def trained(self) -> tuple[int, ...]:
        """The positions of operands that need a gradient."""
        return tuple(k for k, needs in enumerate(self.tensors.input_grads) if needs)

    def operand_items(self, k: int) -> Values:
        """The elements of one operand on the fullest device."""
        return self.operand_bytes(k) / self.inputs[k].item_bytes

    def operand_bytes(self, k: int) -> Values:
        """The bytes of one operand on the fullest device."""
        subdims = self.tensors.input_atoms[k]
        return operand_local_bytes(self.space, k, self.inputs[k], subdims, self.mesh)

    def read_bytes(self) -> Values:
        """The bytes that are read: of a table that is looked up, only the rows read."""
        return operand_bytes(self.space, self.tensors, self.mesh)

    def result_items(self, k: int) -> Values:
        """The elements of one result on the fullest device."""
        layouts, subdims = self.space.result_layouts(k), self.tensors.result_atoms[k]
        return local_items(layouts, subdims, self.mesh.shape)

    def result_bytes(self, k: int) -> Values:
        """The bytes of one result on the fullest device."""
        return self.result_items(k) * self.results[k].item_bytes

    def parts(self, base: str) -> Values:
        """Into how many parts a factor is split, for each configuration."""
        counts, rule = self.space.parts(self.mesh.shape), self.space.rule
        members = [i for i in range(len(rule.factors)) if rule.base(i) == base]
        parts: Values = np.prod(counts[:, members], axis=1, dtype=np.float64)
        return parts

    def parts_alone(self, base: str) -> Values:
        """Into how many parts a factor is split by itself, not together with another."""
        counts, rule = self.space.parts(self.mesh.shape), self.space.rule
        members = [i for i in range(len(rule.factors)) if rule.base(i) == base]
        alone = [_parts_alone(self.space, counts, i) for i in members]
        parts: Values = np.prod(alone, axis=0, dtype=np.float64)
        return parts

    def factor(self, base: str) -> Values:
        """The points of one of the rule's factors on the fullest device; 1 if it has none."""
        local = local_factors(self.space, self.mesh)
        rule = self.space.rule
        members = [i for i in range(len(rule.factors)) if rule.base(i) == base]
        points: Values = np.prod(local[:, members], axis=1, dtype=np.float64)
        return points

    def points(self, *bases: str) -> Values:
        """The points of several factors on the fullest device, as rows go to their experts."""
        return points(self.space, bases, self.mesh)

    def last_dim(self) -> Values:
        """The points of the first operand's last dim on the fullest device."""
        factors = self.space.rule.rule.operands[0][-1]
        if not factors:
            return np.full(len(self.space.configs), float(self.inputs[0].shape[-1]))
        points: Values = np.prod([self.factor(f) for f in factors], axis=0)
        return points


def _padded(kernel: Kernel) -> Kernel:
    """A compiled product has its rows padded to 16 bytes (inductor's `shape_padding`)."""
    stem, _, last = kernel.family.rpartition(".")
    return replace(kernel, family=stem) if last in ("even", "odd") else kernel


FLOAT8_SIDES = 16  # all sides of a product are multiples of it (torch._scaled_mm)
CASTS, CAST_BYTES = 2.0, 5.0  # kernels, and bytes for an item: read for its scale, read, written


def _in_float8(kernel: Kernel) -> list[Kernel]:
    """A product with its operands scaled and cast before it, where its sides allow it."""
    if not kernel.family.startswith("matmul"):
        return [kernel]
    sizes = np.broadcast_arrays(*[np.asarray(size, dtype=np.float64) for size in kernel.sizes])
    m, n, k = sizes
    fits = np.all([size % FLOAT8_SIDES == 0 for size in sizes], axis=0)
    calls = 2 * CASTS
    cast = CAST_BYTES * (m * k + n * k) / calls
    return [
        Kernel("vector", kernel.dtype, (cast * fits,), calls * kernel.times),
        replace(kernel, dtype="float8", sizes=(m * fits, n, k)),
        replace(kernel, sizes=(m * ~fits, n, k)),
    ]


def _compute(work: Work, phase: Phase, times: float, flops: Values, moved: Values) -> Compute:
    """One pass of an operator; a view does nothing, but has to be asked for."""
    engine = work.space.rule.rule.engine
    kernels = 1 if phase == "forward" else max(1, len(work.trained))
    kernels = 0 if engine == "none" else kernels
    dtype = work.tensors.precision.product(work.dtype) if engine == "matrix" else work.dtype
    dtype = "float8" if work.access.is_float8 else dtype
    return Compute(phase, engine, dtype, times * flops, times * moved, kernels, work)


def points(space: Space, over: Sequence[str], mesh: Mesh) -> Values:
    """Points of some factors on the fullest device.

    A causal factor in n parts is skewed: the last part attends to almost everything, so it does
    (2n - 1)/n**2 of the work instead of 1/n; not so where it is split together with another, and
    dealt out. A device's part of a joint factor's last member meets the others' parts of the first:
    rows come from all to the experts at hand, to the fullest device more than to others; keys go
    round to all queries.
    """
    rule = space.rule.rule
    parts, local = space.parts(mesh.shape), local_factors(space, mesh)
    total = np.ones(len(space.configs))
    for i in range(len(space.rule.factors)):
        base = space.rule.base(i)
        if base in over:
            total *= local[:, i]
        if base in rule.skewed:
            alone = _parts_alone(space, parts, i)
            total *= (2.0 * alone - 1.0) / alone
        if i in space.rule.joint and set(rule.joint[base]) <= set(over):
            total *= parts[:, i]
    routed = {members[-1] for members in rule.joint.values()} & set(over)
    own = [i for i in range(len(space.rule.factors)) if space.rule.base(i) in routed]
    return np.where((parts[:, own] > 1).any(axis=1), total * rule.imbalance, total)


def _parts_alone(space: Space, parts: NDArray[np.int64], factor: int) -> NDArray[np.int64]:
    """Into how many parts a factor is split by itself, not together with another."""
    joint = [own for own, members in space.rule.joint.items() if factor in members]
    alone: NDArray[np.int64] = parts[:, factor] // np.prod(parts[:, joint], axis=1, dtype=np.int64)
    return alone


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
    joins = exchange.kind in ("all_gather", "reduce_scatter") or exchange.together
    own = [i for i in range(len(space.rule.factors)) if space.rule.base(i) == exchange.factor]
    splits = np.isin(space.configs, own)
    masks = splits.astype(np.int64) @ (1 << np.arange(len(mesh.axes), dtype=np.int64))
    sizes = np.full(len(local), exchange.words * exchange.item_bytes)
    parts, longer = space.parts(mesh.shape), dict(exchange.longer)
    for base in exchange.over:
        own = [i for i in range(len(space.rule.factors)) if space.rule.base(i) == base]
        is_split = (parts[:, own] > 1).any(axis=1)
        sizes *= np.prod(local[:, own], axis=1) + longer.get(base, 0.0) * is_split
    found = []
    for axes, rows in by_axes(masks, len(mesh.axes)):
        members = math.prod(mesh.axes[a].size for a in axes)
        size = sizes[rows] * (members if joins else 1)
        made = Collective(phase, exchange.kind, axes, rows, size, exchange.repeats)
        if exchange.beside is not None:
            made = replace(made, repeats=members - exchange.beside, pieces=members)
        if made.repeats:
            found.append(made)
    return found


def matrix_steps(graph: Graph, subdims: Subdims) -> list[Compute]:
    """The matrix products of a whole step, unsplit, forward and backward."""
    found = []
    for index, rule in enumerate(subdims.rules):
        space = Space(rule, np.zeros((1, 0), dtype=np.int8))
        steps = operator_steps(space, Tensors.of(graph, subdims, index), Mesh(())).steps
        found += [s for s in steps if isinstance(s, Compute) and s.engine == "matrix"]
    return found


def model_flops(graph: Graph, subdims: Subdims) -> float:
    """Operations of all matrix products of a step; what is computed twice is counted once."""
    return fsum(float(step.flops[0]) for step in matrix_steps(graph, subdims))


def ideal_seconds(graph: Graph, subdims: Subdims, device: Device) -> float:
    """Seconds that one device at its peak rate would take for them."""
    steps = matrix_steps(graph, subdims)
    return fsum(float(step.flops[0]) / device.peak(step.dtype) for step in steps)
