"""The stages of a pipeline on one rank: what each runs, what crosses, and in which order.

Every part of the cluster lowers the whole model as it follows the plan, on its own mesh. A stage is
a stretch of those instructions. A tensor crosses from the layout in which one stage leaves it to
the one in which the next finds it (`crossings.py`), from stage to stage until the last that reads
it; its gradient comes back the same way. What depends on no parameter does not cross: every stage
makes it for itself.

The order of actions is data (`shardfold.pipeline.schedules`), in the words of
torch.distributed.pipelining: `2F0` is the forward of stage 2 on micro-batch 0, `2B0` its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from shardfold.capture import Program
from shardfold.errors import PlanError, RunError
from shardfold.pipeline import Action, Pipeline
from shardfold.pipeline.cut import Layers
from shardfold.planner.batch_slices import cut
from shardfold.plans import Plan
from shardfold.runtime.crossings import Crossing
from shardfold.runtime.lower import Lowered
from shardfold.runtime.ops import Context
from shardfold.runtime.reshard import Moves, perform
from shardfold.runtime.stage_links import Links, Tied
from shardfold.simulate.parts import Part

if TYPE_CHECKING:
    from shardfold.runtime.module import Batch, Observer, Parallel, Run
    from shardfold.runtime.parameter_uses import Uses

RUN = ("gpipe", "1f1b", "interleaved")  # schedules whose backward is one action


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
        pieces = [
            piece
            for each in self._contents(message)
            for piece in each.incoming(message.side).buffers(context)
        ]
        works = self.links.receive(pieces, source, message.side)
        self.arriving[message] = [tensor for _, tensor in pieces], works

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
        context, left = self.stages[action.stage].run.context, iter(tensors)
        ways = [each.incoming(message.side) for each in self._contents(message)]
        return [way.joined(list(islice(left, len(way.pieces))), context) for way in ways]

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
            sent = (p for t, each in pairs for p in each.outgoing(message.side).cut(t, context))
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
                _sum_tied(tensor, tied, users, self.links, module._run.context)
        for stage in self.stages.values():
            if stage.run.uses is not None:
                stage.run.uses.settle()
        for tensor, parameter in self._plain_tied(module):
            if parameter.requires_grad:
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                total = self.links.sum_over(self.tied[tensor], own, module._run.context)
                known = before[tensor]
                parameter.grad = total if known is None else known + total

    def _plain_tied(self, module: Parallel) -> Iterator[tuple[int, Tensor]]:
        """Parameters that several parts have, where a part is one device: in the order of all."""
        found = {
            tensor: held[leaf]
            for _, tensor, held, leaf in module._run.owners
            if tensor in self.tied and not isinstance(held[leaf], DTensor)
        }
        yield from sorted(found.items(), key=lambda each: each[0])

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


def _sum_tied(
    tensor: int, tied: Tied, users: Sequence[Uses], links: Links, context: Context
) -> None:
    """Put the sum over all parts of the cluster in place of this part's gradient."""
    found = [uses.found.pop(tensor) for uses in users if tensor in uses.found]
    total = users[0].nothing(tensor) if not found else sum(found[1:], start=found[0])
    if tied.ways is None:
        total = links.sum_over(tied, total, context)
    if tied.onward is not None:
        total = perform(tied.onward, total, users[0].groups)
    if tied.ways is not None:
        total = links.sum_over(tied, total, context)
    users[0].found[tensor] = total


def _differentiable(crossings: Sequence[Crossing]) -> list[Crossing]:
    return [each for each in crossings if each.requires_grad]


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
