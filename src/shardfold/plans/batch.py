"""The batch of each process: which samples each process reads, and so needs to load.

An axis of the mesh is one of the batch if most of what is read of the batch (in bytes) is read in
parts of its leading dim over that axis. The part of a process is then a range of samples, cut by
the outer axis first; axes that split something else leave copies of it.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from shardfold.errors import RunError
from shardfold.planner.batch_slices import Batch, first_part, mapped
from shardfold.plans.parts import on_part, seat
from shardfold.plans.plan import InputEntry, Plan
from shardfold.sharding.layouts import Bounds, chunk
from shardfold.simulate.decoded import DecodedChoice


def example_for(plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Batch:
    """What a pass of the plan takes of an example of its whole batch."""
    return first_part(args, kwargs or {}, plan.micro_batch_dims, plan.micro_batches)


WHOLE, SAMPLES = "replicated", "dim 0"


def inputs_of(
    decoded: DecodedChoice, cuts: Mapping[str, tuple[str, int]] = MappingProxyType({})
) -> tuple[InputEntry, ...]:
    """Every tensor of the batch, and how it is cut into parts: of devices, and of passes."""
    graph, subdims = decoded.graph, decoded.subdims
    votes, leading = _votes(decoded)
    entries = []
    for index, tensor in enumerate(graph.tensors):
        if tensor.role != "input":
            continue
        is_batch = _has_samples(decoded, index) and subdims.classes[index][0] == leading
        layout = tuple(SAMPLES if vote and is_batch else WHOLE for vote in votes)
        place, dim = cuts.get(tensor.name, ("", None))
        kind = tensor.type
        entries.append(InputEntry(tensor.name, kind.shape, layout, dim, place, kind.dtype))
    return tuple(entries)


def _has_samples(decoded: DecodedChoice, tensor: int) -> bool:
    """Whether the leading dim is one piece, of which every device can have a range."""
    return decoded.subdims.dims[tensor].count(0) == 1


def _votes(decoded: DecodedChoice) -> tuple[list[bool], int]:
    """For each axis, whether it splits the samples; and which sub-dim the samples are."""
    graph, subdims, tables = decoded.graph, decoded.subdims, decoded.tables
    weights = np.zeros((2, len(tables.mesh.axes)))
    sizes: dict[int, float] = {}
    for tensor, readers in graph.readers().items():
        if graph.tensors[tensor].role != "input" or not _has_samples(decoded, tensor):
            continue
        leading, size = subdims.classes[tensor][0], graph.tensors[tensor].type.bytes
        sizes[leading] = sizes.get(leading, 0.0) + size
        for reader, position in readers:
            if not graph.has_gradient(reader):
                continue  # made whole on every device, and sliced for free
            layouts = tables.wiring.sides.operand(reader, position)
            row = layouts[decoded.choice[reader]]
            weights[(row == 0).astype(int), range(len(row))] += size
    most = max(sizes, key=lambda k: sizes[k], default=-1)
    return [bool(yes > no) for no, yes in weights.T], most


def samples_of(plan: Plan) -> int:
    """The samples of the whole batch."""
    shapes = [(entry, entry.whole(plan.micro_batches)) for entry in plan.inputs]
    split = [shape[0] for entry, shape in shapes if SAMPLES in entry.layout]
    cut = [shape[entry.cut] for entry, shape in shapes if entry.cut is not None]
    whole = cut or [shape[0] for _, shape in shapes if shape]
    if not plan.inputs:
        raise RunError("The plan does not say what its batch is: plan again.")
    return (split or whole or [1])[0]


def parts_of(plan: Plan, rank: int | None = None) -> tuple[Bounds, ...]:
    """The ranges of samples that a process reads, one in each pass."""
    plan, place = _seated(plan, rank)
    low, high = _part_at(plan, place)
    entry = _sampled(plan)
    passes = plan.micro_batches if entry is None or entry.cut == 0 else 1
    size = samples_of(plan) // passes
    return tuple((low + k * size, high + k * size) for k in range(passes))


def part_of(plan: Plan, rank: int | None = None) -> Bounds:
    """The range of samples that a process reads, of those of a pass."""
    return _part_at(*_seated(plan, rank))


def _seated(plan: Plan, rank: int | None) -> tuple[Plan, int]:
    """The plan as a process follows it, and its number on the mesh that it is on."""
    part, place = seat(plan, (_rank(plan) if rank is None else rank) % plan.processes)
    return on_part(plan, part), place


def _part_at(plan: Plan, place: int) -> Bounds:
    entry = _sampled(plan)
    layout = () if entry is None else entry.layout
    bounds = (0, samples_of(plan) // plan.micro_batches if entry is None else entry.shape[0])
    strides = [math.prod(axis.size for axis in plan.mesh[k + 1 :]) for k in range(len(plan.mesh))]
    for axis, stride, state in zip(plan.mesh, strides, layout, strict=False):
        if state == SAMPLES:
            bounds = chunk(bounds, axis.size, place // stride % axis.size)
    return bounds


def _sampled(plan: Plan) -> InputEntry | None:
    """An input whose samples are split over devices."""
    return next((entry for entry in plan.inputs if SAMPLES in entry.layout), None)


def local_batch(plan: Plan, batch: Any, rank: int | None) -> Any:
    """The samples of one process, of every tensor that has samples."""
    parts, passes = parts_of(plan, rank), plan.micro_batches
    plan, _ = _seated(plan, rank)
    split = {entry.whole(passes) for entry in plan.inputs if SAMPLES in entry.layout}
    known = {entry.whole(passes) for entry in plan.inputs}

    def taken(value: Any) -> Any:
        if len(parts) == 1:
            return value[slice(*parts[0])]
        return value[[row for bounds in parts for row in range(*bounds)]]

    def part(place: str, value: Any) -> Any:
        shape = getattr(value, "shape", None)
        if shape is None:
            if value is None or isinstance(value, bool | int | float | str):
                return value
            raise RunError(
                f"The batch has a {type(value).__name__}: give tensors, in tuples, lists or dicts."
            )
        if tuple(shape) not in known:
            shapes = ", ".join(map(str, sorted(known)))
            raise RunError(
                f"The batch has a tensor of shape {tuple(shape)}, the plan is for {shapes}. "
                "Give every rank the whole batch (the module takes other shapes so), or pad it."
            )
        return taken(value) if tuple(shape) in split else value

    return mapped(batch, part)


def _rank(plan: Plan) -> int:
    """The number of this process, from torch.distributed or from torchrun."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        return int(distributed.get_rank())
    if "RANK" in os.environ:
        return int(os.environ["RANK"])
    if plan.processes == 1:
        return 0
    raise RunError("No process group is initialised: give the rank, or start it with torchrun.")


class Sampler:
    """The samples of every batch that are this process's, in an order that all processes share.

    All batches are whole ones: what is left of an epoch after the last of them is left out (and
    is other samples each epoch, if they are shuffled).
    """

    def __init__(
        self, plan: Plan, count: int, *, shuffle: bool, seed: int, rank: int | None = None
    ) -> None:
        self.samples = samples_of(plan)
        if count < self.samples:
            raise RunError(f"The data has {count} samples, one batch of the plan {self.samples}.")
        self.count, self.shuffle, self.seed, self.epoch, self.first = count, shuffle, seed, 0, 0
        self.parts = parts_of(plan, rank)

    def __len__(self) -> int:
        return self.count // self.samples

    def __iter__(self) -> Iterator[list[int]]:
        begin = self.epoch * len(self)
        steps = range(begin + self.first, begin + len(self))
        self.first = 0
        return (self.batch(step) for step in steps)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that is iterated over next: another order, if they are shuffled.

        The epoch of `set_step` goes on at that step.
        """
        if epoch != self.epoch:
            self.epoch, self.first = epoch, 0

    def set_step(self, step: int) -> None:
        """Go on at a step, counted over all epochs: the next epoch is the rest of the step's."""
        self.epoch, self.first = divmod(step, len(self))

    def batch(self, step: int) -> list[int]:
        """The samples of one step that are this process's; steps count over all epochs."""
        epoch, number = divmod(step, len(self))
        first = number * self.samples
        rows = [first + row for bounds in self.parts for row in range(*bounds)]
        if not self.shuffle:
            return rows
        order = np.random.default_rng((self.seed, epoch)).permutation(self.count)
        found: list[int] = order[rows].tolist()
        return found
