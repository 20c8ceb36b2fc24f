"""The stages of a pipeline on one rank: what each runs, what crosses, and in which order.

All stages have meshes of one shape, and the plan's splits are of the whole model on it. A stage is
a stretch of the instructions, and a rank exchanges messages with those that have its own place in
the meshes before and after. A tensor crosses in the layout in which it lies, from stage to stage
until the last that reads it; its gradient comes back the same way. What depends on no parameter
does not cross: every stage makes it for itself.

The order of actions is data (`shardfold.pipeline.schedules`), in the words of
torch.distributed.pipelining: `2F0` is the forward of stage 2 on micro-batch 0, `2B0` its backward.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from shardfold.capture import Program
from shardfold.cluster import from_plain
from shardfold.errors import PlanError, RunError
from shardfold.pipeline import Action, Pipeline
from shardfold.pipeline.cut import Layers, cut_cluster
from shardfold.planner.batch_slices import cut
from shardfold.plans import Plan
from shardfold.plans.read import mesh_on
from shardfold.runtime.lower import Lowered
from shardfold.runtime.ops import Context
from shardfold.runtime.ops.local_op import WIDER
from shardfold.runtime.process_groups import Axes, shared
from shardfold.runtime.reshard import Moves, perform
from shardfold.sharding.layouts import copy_axes
from shardfold.simulate.parts import Part

if TYPE_CHECKING:
    from shardfold.runtime.module import Batch, Observer, Parallel, Run
    from shardfold.runtime.parameter_uses import Uses

SendsParts = Callable[[Axes], bool]
RUN = ("gpipe", "1f1b", "interleaved")  # schedules whose backward is one action
SIDES = ("F", "B")


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor on its way to the next stage: this rank's part of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    value_axes: Axes = ()  # along which ranks send a part each of what all of them have
    gradient_axes: Axes = ()

    def axes(self, side: str) -> Axes:
        """Of the value that goes on, or of the gradient that comes back."""
        return self.value_axes if side == "F" else self.gradient_axes


@dataclass(frozen=True, slots=True)
class Cut:
    """One stage of the model: its operators, and what comes in and goes out."""

    part: Part
    received: tuple[int, ...]
    sent: tuple[int, ...]


def pipeline_of(plan: Plan) -> Pipeline | None:
    """The schedule of a plan with stages; refused where it cannot be run."""
    entry = plan.pipeline
    if entry is None:
        return None
    if entry.schedule not in RUN:
        raise RunError(
            f"The schedule {entry.schedule} splits backward in two, which is estimated and not run "
            f"yet. Plan with one of {', '.join(RUN)}."
        )
    return Pipeline(entry.schedule, entry.parts, plan.micro_batches, entry.chunks)


def cuts_of(plan: Plan, program: Program) -> list[Cut]:
    """The stages of a plan, as stretches of the captured program."""
    entry, graph = plan.pipeline, program.graph
    assert entry is not None
    layers = Layers.of(graph)
    if len(entry.layers) != entry.parts * entry.chunks or sum(entry.layers) != len(layers):
        raise PlanError(
            f"The plan puts {sum(entry.layers)} layers into {len(entry.layers)} stages; the model "
            f"has {len(layers)}, and the pipeline {entry.parts * entry.chunks} stages. Plan again."
        )
    parts = layers.parts(entry.layers)
    return [Cut(p, tuple(p.received(graph)), tuple(p.sent(graph))) for p in parts]


def own_program(program: Program, lowered: Lowered) -> Program:
    """The program with no more sources than some instructions read."""
    read = {feed.tensor for i in lowered.instructions for feed in i.feeds}
    return replace(program, sources={t: s for t, s in program.sources.items() if t in read})


@dataclass(frozen=True)
class Stage:
    """A stage of this rank, ready to run."""

    number: int
    run: Run
    received: tuple[Crossing, ...]
    sent: tuple[Crossing, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """What is sent at once: all that leaves a stage, or all gradients that go back from it."""

    stage: int  # that sends
    side: str  # F: results go on; B: gradients go back
    micro_batch: int

    @property
    def target(self) -> int:
        """The stage that receives."""
        return self.stage + (1 if self.side == "F" else -1)


@dataclass(frozen=True, slots=True)
class Tied:
    """A parameter that several parts of the cluster have: which, and how its gradient goes on."""

    devices: tuple[int, ...]
    onward: Moves | None  # from the sum of all to where it is stored


@dataclass(slots=True)
class Links:
    """Messages between a rank and those with its place in other stages' meshes.

    Each direction of each side has a group of its own: messages of one never wait for another's,
    and within one they are in order.
    """

    device: int  # this rank's part of the cluster
    ranks: Sequence[int]  # of all parts, with this rank's place in their meshes
    groups: Mapping[tuple[str, bool], Any]
    under_way: deque[tuple[Any, Tensor]] = field(default_factory=deque)

    @classmethod
    def make(cls, parts: int, size: int, rank: int) -> Links:
        """Make the groups, on all ranks."""
        rows = [[part * size + place for part in range(parts)] for place in range(size)]
        groups = {
            (side, upwards): shared(
                ("stages", side, upwards, str(rows)),
                lambda: dist.new_subgroups_by_enumeration(rows)[0],
            )
            for side in SIDES
            for upwards in (True, False)
        }
        return cls(rank // size, rows[rank % size], groups)

    def send(self, tensors: Iterable[Tensor], device: int, side: str) -> None:
        """Begin to send to another part of the cluster."""
        while self.under_way and self.under_way[0][0].is_completed():
            self.under_way.popleft()
        group = self.groups[side, device > self.device]
        for own in tensors:
            self.under_way.append((dist.isend(own, self.ranks[device], group=group), own))

    def receive(self, tensors: Sequence[Tensor], device: int, side: str) -> list[Any]:
        """Begin to receive from another part of the cluster; what to wait for."""
        group = self.groups[side, device < self.device]
        return [dist.irecv(tensor, self.ranks[device], group=group) for tensor in tensors]

    def finish(self) -> None:
        """Wait for all that was sent."""
        while self.under_way:
            self.under_way.popleft()[0].wait()

    def from_part(self, value: Tensor, device: int) -> Tensor:
        """The value that another part of the cluster has."""
        dist.broadcast(value, self.ranks[device], group=self.groups["F", True])
        return value

    def norm_over(self, own: Tensor, kind: float) -> Tensor:
        """The norm over all parts of the cluster, of which each has its own."""
        group = self.groups["F", True]
        if math.isinf(kind):
            dist.all_reduce(own, op=dist.ReduceOp.MAX, group=group)
            return own
        power = own**kind
        dist.all_reduce(power, group=group)
        return power ** (1 / kind)

    def sum_over(self, devices: Sequence[int], value: Tensor) -> Tensor:
        """The sum over some parts of the cluster, all of which call this."""
        ranks, group = [self.ranks[device] for device in devices], self.groups["F", True]
        own, others = (
            value.contiguous(),
            [rank for rank in ranks if rank != self.ranks[self.device]],
        )
        theirs = {rank: torch.empty_like(own) for rank in others}
        both = [
            *(dist.P2POp(dist.isend, own, rank, group) for rank in others),
            *(dist.P2POp(dist.irecv, each, rank, group) for rank, each in theirs.items()),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        # In the order of the parts, so that all have the same sum to the last digit.
        every = {**theirs, self.ranks[self.device]: own}
        total = every[ranks[0]].clone()
        for rank in ranks[1:]:
            total += every[rank]
        return total


@dataclass
class Stages:
    """The stages of this rank, and the order in which they take turns."""

    pipeline: Pipeline
    stages: Mapping[int, Stage]
    links: Links
    tied: Mapping[int, Tied]  # those that this part of the cluster has
    changed: Mapping[int, int]  # buffers that forward writes, and the part that does
    make_evaluation: Callable[[], Stages] | None = None

    def __post_init__(self) -> None:
        self.order = self.pipeline.actions(self.links.device)
        self.arriving: dict[Message, tuple[list[Tensor], list[Any]]] = {}
        self.open: dict[tuple[int, int], tuple[list[Tensor], list[Any]]] = {}
        self.losses: dict[int, Tensor] = {}
        self.evaluation: Stages | None = None
        for stage in self.stages.values():
            if stage.run.uses is not None:
                stage.run.uses.is_held = True

    def step(self, module: Parallel, batch: Batch, observe: Observer | None = None) -> Tensor:
        """Forward and backward of all micro-batches: the mean loss, and gradients of the step.

        `observe` sees the results of the last micro-batch.
        """
        parts = self._micro_batches(module, batch)
        self._forget()
        before = {t: p.grad for t, p in self._plain_tied(module)}
        for _, parameter in self._plain_tied(module):
            parameter.grad = None
        context, turns = module._run.context, dict.fromkeys(self.stages, 0)
        first = context.step
        for number, action in enumerate(self.order):
            for each in self.order[number : number + 2]:
                self._await(each)
            last = action.micro_batch == self.pipeline.micro_batches - 1
            if action.kind == "F":
                context.step = first + action.micro_batch
                self._forward(module, action, parts, observe if last else None)
            else:
                self._backward(action, turns[action.stage])
                turns[action.stage] += 1
        self.links.finish()
        context.step = first
        self._settle(module, before)
        return self._loss(module)

    def evaluate(self, module: Parallel, batch: Batch) -> Tensor:
        """The mean loss of all micro-batches, without gradients."""
        parts = self._micro_batches(module, batch)
        self._forget()
        with torch.no_grad():
            for action in self.order:
                if action.kind == "F":
                    self._await(action)
                    self._forward(module, action, parts, None)
        self.links.finish()
        if not module.training:
            for name, by in next(iter(self.stages.values())).run.program.increments.items():
                buffer = module.get_buffer(module._run.name(name))
                buffer.add_(by * self.pipeline.micro_batches)
        return self._loss(module)

    def in_eval(self, module: Parallel) -> Stages:
        """The same in eval mode; made when it is first asked for."""
        if self.evaluation is None:
            if self.make_evaluation is None:
                raise RunError("This module was made for training only: use parallelize().")
            self.evaluation = self.make_evaluation()
            for stage in self.evaluation.stages.values():
                stage.run.prepare(module)
        return self.evaluation

    def _micro_batches(self, module: Parallel, batch: Batch) -> list[Batch]:
        args, kwargs = batch
        return cut(args, kwargs, module._run.cuts, self.pipeline.micro_batches)

    def _forget(self) -> None:
        """Begin anew, whatever became of the last step."""
        self.arriving.clear()
        self.open.clear()
        self.losses.clear()
        for stage in self.stages.values():
            if stage.run.uses is not None:
                stage.run.uses.joined.clear()

    def _read(self, action: Action) -> Message | None:
        """What an action waits for."""
        if action.kind == "F":
            return Message(action.stage - 1, "F", action.micro_batch) if action.stage else None
        is_last = action.stage == self.pipeline.stages - 1
        return None if is_last else Message(action.stage + 1, "B", action.micro_batch)

    def _await(self, action: Action) -> None:
        """Have memory ready for what an action reads, and begin to receive."""
        message = self._read(action)
        if message is None or message in self.arriving:
            return
        source = self.pipeline.device_of(message.stage)
        if source == self.links.device:
            return  # it is handed over
        context = self.stages[action.stage].run.context
        tensors = [
            torch.empty(
                _part_size(each, message.side, context), dtype=each.dtype, device=context.device
            )
            for each in self._contents(message)
        ]
        self.arriving[message] = tensors, self.links.receive(tensors, source, message.side)

    def _contents(self, message: Message) -> Sequence[Crossing]:
        """What a message is made of, as its sender or its receiver knows it."""
        if message.stage in self.stages:
            stage = self.stages[message.stage]
            found = stage.sent if message.side == "F" else stage.received
        else:
            stage = self.stages[message.target]
            found = stage.received if message.side == "F" else stage.sent
        return found if message.side == "F" else _differentiable(found)

    def _arrived(self, action: Action) -> list[Tensor]:
        message = self._read(action)
        if message is None:
            return []
        tensors, works = self.arriving.pop(message)
        for work in works:
            work.wait()
        if self.pipeline.device_of(message.stage) == self.links.device:
            return tensors
        context = self.stages[action.stage].run.context
        pairs = zip(tensors, self._contents(message), strict=True)
        return [_joined(tensor, each, message.side, context) for tensor, each in pairs]

    def _give(self, message: Message, tensors: list[Tensor]) -> None:
        """Send, or hand over to another stage of this rank."""
        if not 0 <= message.target < self.pipeline.stages:
            return
        target = self.pipeline.device_of(message.target)
        if target == self.links.device:
            self.arriving[message] = tensors, []
        else:
            pairs = zip(tensors, self._contents(message), strict=True)
            context = self.stages[message.stage].run.context
            sent = (_part(tensor, each, message.side, context) for tensor, each in pairs)
            self.links.send(sent, target, message.side)

    def _forward(
        self, module: Parallel, action: Action, parts: Sequence[Any], observe: Observer | None
    ) -> None:
        stage, number = self.stages[action.stage], action.micro_batch
        received = self._arrived(action)
        if torch.is_grad_enabled():
            received = [
                tensor.detach().requires_grad_(crossing.requires_grad)
                for tensor, crossing in zip(received, stage.received, strict=True)
            ]
        found = stage.run.stage(module, parts[number], received, observe)
        if action.stage == self.pipeline.stages - 1:
            self.losses[number] = found[0].detach()
            edges = [get_gradient_edge(found[0])] if found[0].requires_grad else []
        else:
            self._give(Message(action.stage, "F", number), [each.detach() for each in found])
            pairs = zip(found, stage.sent, strict=True)
            edges = [
                get_gradient_edge(t) if t.requires_grad else None
                for t, crossing in pairs
                if crossing.requires_grad
            ]
        if torch.is_grad_enabled():
            self.open[action.stage, number] = received, edges

    def _backward(self, action: Action, turn: int) -> None:
        stage, number = self.stages[action.stage], action.micro_batch
        received, edges = self.open.pop((action.stage, number))
        gradients = self._arrived(action)
        if action.stage == self.pipeline.stages - 1:
            loss = self.losses[number]
            gradients = [torch.full_like(loss, 1 / self.pipeline.micro_batches)]
        stage.run.take_turn(turn, self.pipeline.micro_batches)
        if stage.run.uses is not None:
            stage.run.uses.begin()
        back = _Back([t for t in received if t.requires_grad], self._give_back(action))
        pairs = [(e, g) for e, g in zip(edges, gradients, strict=False) if e is not None]
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
        back.send()

    def _give_back(self, action: Action) -> Callable[[list[Tensor]], None]:
        return partial(self._give, Message(action.stage, "B", action.micro_batch))

    def norm(self, module: Parallel, kind: float) -> Tensor:
        """The norm of all gradients; those of tied parameters are counted once."""
        firsts = {t: tied.devices[0] for t, tied in self.tied.items()}
        here = self.links.device
        own = [
            held[leaf].grad
            for role, tensor, held, leaf in module._run.owners
            if role == "parameter" and firsts.get(tensor, here) == here
        ]
        found = nn.utils.get_total_norm([g for g in own if g is not None], kind)
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        return self.links.norm_over(whole.to(module._run.context.device), kind)

    # The end of a step

    def _settle(self, module: Parallel, before: Mapping[int, Tensor | None]) -> None:
        """Give parameters their gradients; those that several parts have, the sum of theirs."""
        for tensor, tied in self.tied.items():
            uses = [s.run.uses for s in self.stages.values() if s.run.uses is not None]
            users = [each for each in uses if each.trains(tensor)]
            if users:
                _sum_tied(tensor, tied, users, self.links)
        for stage in self.stages.values():
            if stage.run.uses is not None:
                stage.run.uses.settle()
        for tensor, parameter in self._plain_tied(module):
            if parameter.requires_grad:
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                total = self.links.sum_over(self.tied[tensor].devices, own)
                known = before[tensor]
                parameter.grad = total if known is None else known + total

    def _plain_tied(self, module: Parallel) -> Iterator[tuple[int, Tensor]]:
        """Parameters that several parts have, where a part is one device."""
        for _, tensor, held, leaf in module._run.owners:
            if tensor in self.tied and not isinstance(held[leaf], DTensor):
                yield tensor, held[leaf]

    def _loss(self, module: Parallel) -> Tensor:
        """The mean of the last stage's, on every rank."""
        last = self.pipeline.device_of(self.pipeline.stages - 1)
        count = self.pipeline.micro_batches
        if last == self.links.device:
            loss = torch.stack([self.losses[k] for k in range(count)]).mean()
        else:
            target = module._run.context.target
            kind = module._run.program.graph.tensors[module._run.program.graph.loss].type
            dtype = torch.float64 if target.double else getattr(torch, kind.dtype)
            loss = torch.empty((), dtype=dtype, device=target.device)
        return self.links.from_part(loss, last)


class _Back:
    """The gradients of what a stage received: on their way as soon as all have come.

    At its end backward waits for reductions of parameters' gradients; the stage before must not.
    """

    def __init__(self, received: Sequence[Tensor], give: Callable[[list[Tensor]], None]) -> None:
        self.received, self.give, self.missing = received, give, len(received)
        self.is_sent = False
        for tensor in received:
            tensor.register_post_accumulate_grad_hook(self._came)

    def _came(self, tensor: Tensor) -> None:
        self.missing -= 1
        if not self.missing:
            self.send()

    def send(self) -> None:
        """Send what has come, and zeros for what has not; once."""
        if not self.is_sent:
            self.is_sent = True
            self.give([torch.zeros_like(t) if t.grad is None else t.grad for t in self.received])


def _sum_tied(tensor: int, tied: Tied, users: Sequence[Uses], links: Links) -> None:
    """Put the sum over all parts of the cluster in place of this part's gradient."""
    found = [uses.found.pop(tensor) for uses in users if tensor in uses.found]
    own = users[0].nothing(tensor) if not found else sum(found[1:], start=found[0])
    total = links.sum_over(tied.devices, own)
    if tied.onward is not None:
        total = perform(tied.onward, total, users[0].groups)
    users[0].found[tensor] = total


def _part_size(crossing: Crossing, side: str, context: Context) -> tuple[int, ...]:
    """The shape of what this rank sends or receives."""
    axes = crossing.axes(side)
    if not axes:
        return crossing.shape
    return (-(-math.prod(crossing.shape) // _members(axes, context)),)


def _members(axes: Axes, context: Context) -> int:
    return math.prod(context.groups.place.shape[axis] for axis in axes)


def _part(tensor: Tensor, crossing: Crossing, side: str, context: Context) -> Tensor:
    """What this rank sends: all, or its part of what several have, the last ones filled up."""
    axes, whole = crossing.axes(side), tensor.contiguous()
    if not axes:
        return whole
    (size,) = _part_size(crossing, side, context)
    place = context.groups.place
    number = place.members(axes).index(place.at)
    part = whole.view(-1)[number * size : (number + 1) * size]
    return nn.functional.pad(part, (0, size - len(part)))


def _joined(part: Tensor, crossing: Crossing, side: str, context: Context) -> Tensor:
    """The whole, from the parts that this rank and others received."""
    axes = crossing.axes(side)
    if not axes:
        return part
    every = context.groups.all_gather(part, axes, _members(axes, context))
    return every.view(-1)[: math.prod(crossing.shape)].view(crossing.shape)


def _differentiable(crossings: Sequence[Crossing]) -> list[Crossing]:
    return [each for each in crossings if each.requires_grad]


def crossings(
    program: Program, lowered: Lowered, tensors: Sequence[int], double: bool, sends: SendsParts
) -> tuple[Crossing, ...]:
    """Parts of tensors, as this rank has them, that cross between two stages."""
    writers = program.graph.writers()
    found = []
    for tensor in tensors:
        op, result = writers[tensor]
        about, instruction = program.graph.tensors[tensor], lowered.instructions[op]
        dtype = getattr(torch, about.type.dtype)
        dtype = WIDER.get(dtype, dtype) if double else dtype
        row = instruction.layout(result)
        copies = (copy_axes(row, of_gradient=back) for back in (False, True))
        axes = (each if sends(each) else () for each in copies)
        found.append(Crossing(instruction.shape(result), dtype, about.requires_grad, *axes))
    return tuple(found)


def parts_senders(plan: Plan, pipeline: Pipeline) -> list[SendsParts]:
    """For each boundary between stages: whether ranks along some axes send a part each."""
    links = cut_cluster(from_plain(plan.provenance.cluster), pipeline.devices)
    mesh = mesh_on(plan, links.stage)

    def sends(hop: int | None, axes: Axes) -> bool:
        return hop is not None and links.sends_parts(hop, [mesh.axes[axis] for axis in axes])

    found: list[SendsParts] = []
    for stage in range(pipeline.stages - 1):
        ends = pipeline.device_of(stage), pipeline.device_of(stage + 1)
        found.append(partial(sends, None if ends[0] == ends[1] else links.hop(*ends)))
    return found


def tied_parameters(
    program: Program, lowered: Lowered, cuts: Sequence[Cut], pipeline: Pipeline
) -> dict[int, Tied]:
    """Parameters that several parts of the cluster have."""
    graph = program.graph
    devices: dict[int, set[int]] = {}
    onward: dict[int, Moves] = {}
    for stage, each in enumerate(cuts):
        for op in each.part.ops:
            for feed in lowered.instructions[op].feeds:
                if graph.tensors[feed.tensor].role == "parameter":
                    devices.setdefault(feed.tensor, set()).add(pipeline.device_of(stage))
                    if feed.onward is not None:
                        onward[feed.tensor] = feed.onward
    several = {t: tuple(sorted(each)) for t, each in sorted(devices.items()) if len(each) > 1}
    return {t: Tied(each, onward.get(t)) for t, each in several.items()}


def changed_buffers(
    program: Program, lowered: Lowered, cuts: Sequence[Cut], pipeline: Pipeline
) -> dict[int, int]:
    """The buffers that forward writes, each with the part of the cluster that does."""
    found: dict[int, int] = {}
    for stage, each in enumerate(cuts):
        device = pipeline.device_of(stage)
        for op in each.part.ops:
            site = lowered.instructions[op].site
            names = {"shardfold.write": {site.op.operands[0].name}} if site.op.operands else {}
            written = names.get(site.op.kind, site.rule.rule.operator.writes)
            for operand in site.op.operands:
                if operand.name not in written or operand.tensor not in program.sources:
                    continue
                if program.sources[operand.tensor].role != "buffer":
                    continue
                if found.setdefault(operand.tensor, device) != device:
                    name = program.graph.tensors[operand.tensor].name
                    raise RunError(f"Several stages write the buffer {name}: plan without stages.")
    return found


def position(plan: Plan, rank: int) -> int:
    """A rank's place in the mesh of its stage."""
    return rank % math.prod(axis.size for axis in plan.mesh)
