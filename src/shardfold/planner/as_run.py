"""A step as another stack runs it: its optimizer, its prices of gradients, its schedule.

The splits are priced as the planner's own. What ZeRO and a stack's habits change is done to the
schedule: ZeRO-1 and ZeRO-2 keep whole parameters, reduce-scatter gradients, update a part, and
all-gather the updated parameters; with ZeRO-1 whole gradients are kept, and reduced in the last
micro-batch, with ZeRO-2 in each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from shardfold.cluster.hardware import Device
from shardfold.costs import CostModel, Optimizer
from shardfold.costs.steps import Collective, Compute, Kind, Phase, Values
from shardfold.graph import Graph, TensorType
from shardfold.graph.repeats import MODEL
from shardfold.simulate import Operator, Schedule, Task
from shardfold.simulate.schedule import Turn
from shardfold.strategies.stacks import FLASH_ATTENTION, OWN, Stack
from shardfold.strategies.stated import Placed, Stated

FLOAT32 = 4
BUCKETED = ("all_reduce", "reduce_scatter", "all_gather")  # of parameters and their gradients
Bytes = Mapping[str, float]  # by class


def float32_optimizer(optimizer: Optimizer, stack: Stack, item_bytes: int) -> Optimizer:
    """The optimizer with what the stack keeps in float32, counted in items of the parameters."""
    if stack.fused_optimizer:
        optimizer = replace(optimizer, copies=0)
    wider = FLOAT32 // item_bytes
    if wider <= 1 or not (stack.master_weights or stack.float32_parts):
        return optimizer
    weights = wider if stack.master_weights else wider - 1  # of FSDP, the parts themselves
    written = 1 if stack.master_weights else 0  # the copy that forward reads
    return replace(
        optimizer,
        states=optimizer.states * wider + weights,
        memory_passes=optimizer.memory_passes * wider + written,
    )


def parameter_type(graph: Graph) -> TensorType:
    """Of the largest parameter."""
    kinds = [t.type for t in graph.tensors if t.role == "parameter" and t.requires_grad]
    return max(kinds, key=lambda kind: kind.bytes, default=TensorType((), "float32"))


def parameter_bytes(graph: Graph) -> int:
    """Of all parameters of the model; those of one period stand for its copies, too."""
    readers = graph.readers()
    copies = {op: 1 + each.missing for each in graph.repeats for op in each.ops(MODEL)}
    return sum(
        tensor.type.bytes * copies.get(readers[index][0][0], 1)
        for index, tensor in enumerate(graph.tensors)
        if tensor.role == "parameter" and index in readers
    )


@dataclass(frozen=True)
class StackPrices:
    """Prices with a stack's own kernels and types.

    Gradients that cross the axes of the batch are `wider` than parameters. Parameters of so many
    bytes are `gathered` together; the gradients of so many share one `bucket`. Attention in one
    kernel is `slower` than the cost model's, by phase, and adding gradients up by `summed`.
    """

    model: CostModel
    data: tuple[int, ...]
    wider: float
    slower: Mapping[Phase, float]
    summed: float
    gathered: float
    bucket: float

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)  # what a cost model says of itself

    def compute_seconds(self, step: Compute) -> Values:
        """Local work, the host's part with it where a model tells that apart."""
        return self.model.compute_seconds(step) * self._factor(step)

    def device_seconds(self, step: Compute) -> Values:
        """Local work of the device alone, of a model that tells it apart from the host's."""
        found: Values = getattr(self.model, "device_seconds")(step)  # noqa: B009
        return found * self._factor(step)

    def _factor(self, step: Compute) -> float:
        if step.turn == "later":
            return self.summed
        if step.work is None or step.phase not in self.slower:
            return 1.0
        words = step.work.space.rule.rule.operator.words.values()
        return self.slower[step.phase] if "heads" in words else 1.0

    def collective_seconds(self, step: Collective) -> Values:
        """A sum of gradients in their own type; a part of a bucket takes that part of its time."""
        if step.kind not in BUCKETED or not set(step.axes) <= set(self.data):
            return self.model.collective_seconds(step)
        bucket = self.gathered if step.kind == "all_gather" else self.bucket
        if step.kind in ("all_reduce", "reduce_scatter") and step.phase == "backward":
            step = replace(step, bytes=step.bytes * self.wider)
            bucket *= self.wider
        together = np.maximum(step.bytes, bucket)
        share = np.divide(step.bytes, together, out=np.ones_like(together), where=together > 0)
        return share * self.model.collective_seconds(replace(step, bytes=together))


def prices(
    model: CostModel, stack: Stack, placed: Placed, device: Device, graph: Graph, stages: int
) -> CostModel:
    """The prices of a stack on a device, for a model of so many stages."""
    if stack is OWN:
        return model
    kind, mesh = parameter_type(graph), placed.mesh
    wider = FLOAT32 / kind.item_bytes if stack.float32_reduction else 1.0
    slower = _attention_slowdown(stack, device, kind.dtype)
    # A gradient and a sum are read, a sum is written: two of the three are sums.
    summed = (1 + 2 * FLOAT32 / kind.item_bytes) / 3 if stack.float32_gradients else 1.0
    parts = stages * math.prod(a.size for n, a in enumerate(mesh.axes) if n not in placed.data)
    whole = parameter_bytes(graph) / parts
    bucket = min(stack.bucket_bytes, whole)
    gathered = whole if stack.gathers_at_once else bucket
    return StackPrices(model, placed.data, wider, slower, summed, gathered, bucket)


def _attention_slowdown(stack: Stack, device: Device, dtype: str) -> dict[Phase, float]:
    """How much longer a stack's attention takes than the device's best, forward and backward."""
    if stack.flash_attention is None or not device.units:
        return {}
    reached = (device.peak(dtype) * share for share in device.attention_efficiency)
    cycles = device.units * device.clock_hz
    fed = (each * cycles for each in FLASH_ATTENTION[stack.flash_attention])
    ratios = [max(1.0, most / its) for most, its in zip(reached, fed, strict=True)]
    return {"forward": ratios[0], "recompute": ratios[0], "backward": ratios[1]}


def as_run(
    schedule: Schedule,
    stated: Stated,
    placed: Placed,
    stack: Stack,
    model: CostModel,
    item_bytes: int,
    routed: Mapping[str, Bytes],
) -> Schedule:
    """The schedule with ZeRO-1 or ZeRO-2, and the habits of a stack.

    `routed` has what is always there of the blocks of experts that rows are sent to.
    """
    if stated.zero == 2 and not stack.reduces_beside:
        stated = replace(stated, zero=1)  # until backward ends, gradients are whole
    if stated.zero in (1, 2):
        schedule = _sharding_state(schedule, _Legs(stated, placed, model), routed)
    if not stack.reduces_beside:
        schedule = _each_operator(schedule, _waiting)
    if stack.float32_gradients and item_bytes < FLOAT32:
        schedule = _scaled_gradients(schedule, FLOAT32 / item_bytes)
    if stack.float32_updates:
        schedule = _updating_in_float32(schedule, stated, item_bytes)
    if stack.keeps_gradients:
        schedule = _keeping_gradients(schedule)
    if stack is not OWN:
        schedule = _each_operator(schedule, lambda op: _asked_for(op, model))
    return _with_buffers(schedule, stated, stack, item_bytes)


# ZeRO-1 and ZeRO-2, as a change of data parallelism's schedule


@dataclass(frozen=True)
class _Legs:
    """What an all-reduce over the batch becomes where some of its devices keep parts."""

    stated: Stated
    placed: Placed
    model: CostModel

    @property
    def levels(self) -> tuple[int, ...]:
        return self._levels(self.placed.data)

    def of_experts(self) -> _Legs:
        """Of experts that rows are sent to: a device's own are shared by fewer."""
        placed, sent = self.placed, set(self.placed.experts)
        shards = tuple(a for a in placed.shards if a not in sent)
        replicas = tuple(a for a in placed.replicas if a not in sent)
        parts = math.prod(placed.mesh.axes[a].size for a in shards)
        placed = replace(placed, shards=shards, replicas=replicas)
        return replace(self, stated=replace(self.stated, shards=parts), placed=placed)

    def reduced(self, size: float) -> tuple[float, tuple[int, ...]]:
        """Scattered over the shards, then summed over the replicas; its seconds and levels."""
        seconds = self._price("backward", "reduce_scatter", self.placed.shards, size)
        part = size / self.stated.shards
        seconds += self._price("backward", "all_reduce", self.placed.replicas, part)
        return seconds, self.levels

    def gathered(self, size: float) -> tuple[float, tuple[int, ...]]:
        """The updated parameter, gathered from the shards."""
        seconds = self._price("update", "all_gather", self.placed.shards, size)
        return seconds, self._levels(self.placed.shards)

    def _levels(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted({self.placed.mesh.axes[a].level for a in axes}))

    def _price(self, phase: Phase, kind: Kind, axes: tuple[int, ...], size: float) -> float:
        if not axes:
            return 0.0
        row = np.zeros(1, dtype=np.intp)
        step = Collective(phase, kind, axes, row, np.array([size]))
        return float(self.model.collective_seconds(step)[0])


def _sharding_state(schedule: Schedule, legs: _Legs, routed: Mapping[str, Bytes]) -> Schedule:
    """Optimizer state in parts, and of ZeRO-2 gradients too; of experts, in parts of their own."""
    stated, experts = legs.stated, legs.of_experts() if routed else legs

    def sharded(op: Operator) -> Operator:
        return _sharded(op, experts if op.name in routed else legs)

    found = _each_operator(schedule, sharded)
    resident = dict(found.resident)
    for name in ("optimizer", *(["gradients"] if stated.zero == 2 else ())):
        if name in resident:
            own = sum(
                routed[op.name].get(name, 0.0) * segment.count
                for segment in found.segments
                for op in segment.operators
                if op.name in routed
            )
            rest = resident[name] - own
            resident[name] = rest / stated.shards + own / experts.stated.shards
    kept = resident["optimizer"] / found.resident["optimizer"] if found.updating else 1.0
    return msgspec.structs.replace(found, resident=resident, updating=found.updating * kept)


def _sharded(op: Operator, legs: _Legs) -> Operator:
    """Each all-reduce is a reduce-scatter now and an all-gather after the update."""
    stated = legs.stated
    parts = stated.shards if stated.zero == 2 else 1
    backward, gathers = list[Task](), list[Task]()
    for task in op.backward:
        if task.mode == "behind" and task.kind == "all_reduce" and task.levels == legs.levels:
            seconds, levels = legs.reduced(task.bytes)
            turn: Turn = "every" if stated.zero == 2 else task.turn
            reduced = msgspec.structs.replace(
                task, kind="reduce_scatter", seconds=seconds, levels=levels, turn=turn
            )
            backward.append(_parted(reduced, parts))
            seconds, levels = legs.gathered(task.bytes)
            gathers.append(Task("all_gather", seconds, "wait", levels, task.bytes))
        else:
            backward.append(_parted(task, parts))
    update = [
        _parted(msgspec.structs.replace(task, seconds=task.seconds / stated.shards), parts)
        for task in op.update
    ]
    return msgspec.structs.replace(op, backward=tuple(backward), update=(*update, *gathers))


def _parted(task: Task, parts: float) -> Task:
    """The task with a part of the gradients that it takes or gives."""
    takes, gives = (
        {name: size / parts if name == "gradients" else size for name, size in side.items()}
        for side in (task.takes, task.gives)
    )
    return msgspec.structs.replace(task, takes=takes, gives=gives)


# Habits


def _each_operator(schedule: Schedule, change: Callable[[Operator], Operator]) -> Schedule:
    segments = tuple(
        msgspec.structs.replace(s, operators=tuple(map(change, s.operators)))
        for s in schedule.segments
    )
    return msgspec.structs.replace(schedule, segments=segments)


def _each_task(op: Operator, change: Callable[[Task], Task]) -> Operator:
    backward, update = tuple(map(change, op.backward)), tuple(map(change, op.update))
    return msgspec.structs.replace(op, backward=backward, update=update)


def _waiting(op: Operator) -> Operator:
    """Work waits for each reduction, as it does where all are made after backward."""
    return _each_task(
        op,
        lambda task: msgspec.structs.replace(task, mode="wait") if task.mode == "behind" else task,
    )


def reduced_after(schedule: Schedule) -> Schedule:
    """What the last micro-batch's backward would wait for comes after it, before the update.

    In a pipeline that makes a difference: the stages before wait for backward, and not for that.
    """
    return _each_operator(schedule, _reduced_after)


def _reduced_after(op: Operator) -> Operator:
    late = tuple(task for task in op.backward if task.mode == "wait" and task.turn == "last")
    if not late:
        return op
    backward = tuple(task for task in op.backward if task not in late)
    return msgspec.structs.replace(op, backward=backward, update=(*late, *op.update))


def _asked_for(op: Operator, model: CostModel) -> Operator:
    """What the host takes to ask for collectives that work waits for, as one call of PyTorch each.

    Schedules of our own plans do not have it yet.
    """
    host: Callable[[Sequence[str], str], float] | None = getattr(model, "host_of", None)
    if host is None:
        return op

    def asked(tasks: Sequence[Task], phase: str) -> tuple[Task, ...]:
        found: list[Task] = []
        for task in tasks:
            seconds = host([task.kind], phase) if task.mode == "wait" else 0.0
            if seconds:
                found.append(Task(phase, 0.0, turn=task.turn, host_seconds=seconds))
            found.append(task)
        return tuple(found)

    again = tuple(
        msgspec.structs.replace(each, tasks=asked(each.tasks, "forward")) for each in op.again
    )
    forward, backward = asked(op.forward, "forward"), asked(op.backward, "backward")
    return msgspec.structs.replace(op, forward=forward, backward=backward, again=again)


def _scaled_gradients(schedule: Schedule, wider: float) -> Schedule:
    """Gradients that stay, in a wider type."""
    found = _each_operator(schedule, lambda op: _each_task(op, lambda t: _parted(t, 1 / wider)))
    resident = dict(found.resident)
    if "gradients" in resident:
        resident["gradients"] *= wider
    return msgspec.structs.replace(found, resident=resident)


def _updating_in_float32(schedule: Schedule, stated: Stated, item_bytes: int) -> Schedule:
    """Gradients of what a device updates, once more and wider, while it does."""
    parts = stated.shards if stated.zero else 1
    copies = schedule.resident.get("parameters", 0.0) * FLOAT32 / item_bytes / parts
    return msgspec.structs.replace(schedule, updating=schedule.updating + copies)


def _keeping_gradients(schedule: Schedule) -> Schedule:
    """Gradients that are there all the time: what the update would give back is never taken."""
    if "gradients" in schedule.resident:
        return schedule
    total = sum(
        task.gives.get("gradients", 0.0) * segment.count
        for segment in schedule.segments
        for op in segment.operators
        for task in op.update
    )
    found = _each_operator(schedule, lambda op: _each_task(op, _without_gradients))
    return msgspec.structs.replace(found, resident={**schedule.resident, "gradients": total})


def _with_buffers(schedule: Schedule, stated: Stated, stack: Stack, item_bytes: int) -> Schedule:
    """Copies of gradients and buckets that a stack holds all the time, where it reduces any."""
    whole = schedule.resident.get("parameters", 0.0)
    copies = whole * stack.gradient_copies if stated.data > 1 or stack.buffer_bytes else 0.0
    if stack.float32_part_gradients:
        copies += whole * FLOAT32 / item_bytes / stated.shards
    extra = copies + stack.buffer_bytes
    if not extra:
        return schedule
    resident = dict(schedule.resident)
    resident["buffers"] = resident.get("buffers", 0.0) + extra
    return msgspec.structs.replace(schedule, resident=resident)


def _without_gradients(task: Task) -> Task:
    takes, gives = (
        {name: size for name, size in side.items() if name != "gradients"}
        for side in (task.takes, task.gives)
    )
    return msgspec.structs.replace(task, takes=takes, gives=gives)
