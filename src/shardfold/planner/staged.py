"""A stated pipeline: its stages priced one by one, and all of them simulated.

Where all parts of the cluster are laid out alike, the model is priced once, on the mesh of one.
Else it is once for each choice that parts follow, and what crosses between two of them goes tile by
tile. A stage's passes are those of its part of the schedule, simulated as any other; the pipeline's
simulator puts them together. A device holds what its parts keep for every micro-batch in flight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from shardfold.cluster import Mesh
from shardfold.cluster.mesh import Axis
from shardfold.costs import CostModel
from shardfold.costs.steps import Collective, Kind
from shardfold.graph import Graph
from shardfold.pipeline import Pipeline, PipelineSimulation, StageTimes
from shardfold.pipeline import simulate as run_pipeline
from shardfold.pipeline.boundary import End, copies, route
from shardfold.pipeline.cut import (
    Layers,
    StageLinks,
    Untied,
    balanced,
    check_layers,
    cut_cluster,
    equal,
    in_words,
    untie,
)
from shardfold.pipeline.simulator import held
from shardfold.planner.as_run import FLOAT32, reduced_after
from shardfold.planner.case import ResolvedRequest
from shardfold.planner.estimated import EstimatedStage, Pipelined
from shardfold.planner.stated_run import ChosenRun, Run, run_stated
from shardfold.sharding.layouts import copy_axes, forward_states, gradient_states
from shardfold.simulate import Exposed, Schedule
from shardfold.simulate.memory import LocalLayouts
from shardfold.simulate.parts import Part
from shardfold.simulate.simulate import Pass, passes, whole_step
from shardfold.strategies.baselines import Axes
from shardfold.strategies.stacks import OWN, Stack
from shardfold.strategies.stated import Stated

Bytes = Mapping[str, float]  # by class
Message = Mapping[Axes, float]  # bytes of what every device along some axes has a copy of


@dataclass(frozen=True)
class StagePasses:
    """What one part of the model does on its devices."""

    schedule: Schedule
    passes: Sequence[Pass]
    weight_seconds: float  # of backward, for the gradients of weights
    sent: Message  # to the next part, of a micro-batch
    returned: Message  # to the part before: gradients

    @property
    def usual(self) -> Pass:
        """Neither the first nor the last micro-batch, where there are others."""
        return self.passes[1] if len(self.passes) == 3 else self.passes[0]


def stage(
    graph: Graph,
    request: ResolvedRequest,
    stated: Stated,
    stack: Stack,
    run_on: Run = run_stated,
) -> Staged:
    """Cut the model and the cluster, and price every part."""
    links = cut_cluster(request.cluster, stated.stages)
    layers = Layers.of(graph)
    check_layers(layers, stated.stages, stated.chunks)
    pipeline = Pipeline(stated.schedule, stated.stages, stated.micro_batches, stated.chunks)
    count = pipeline.stages
    counts, after_head = equal(len(layers), count), 0
    if stack.balances_stages:
        counts, after_head = balanced(_products(layers, request), count)
    parts = layers.parts(counts, after_head)
    untied = untie(graph, parts)
    run = run_on(untied.graph, replace(request, cluster=links.stage), stated, stack)
    return Staged(run, request, pipeline, links, layers, counts, parts, untied)


def _products(layers: Layers, request: ResolvedRequest) -> list[float]:
    """The work of the products with weights in every layer, and after the last."""
    graph = layers.graph
    subdims = request.subdims_of(graph)
    work = [
        rule.rule.flops * rule.rule.points
        if rule.rule.engine == "matrix" and _is_weighted(graph, op)
        else 0.0
        for op, rule in enumerate(subdims.rules)
    ]
    _, inside, after = layers.sums(work)
    return [*inside, after]


def _is_weighted(graph: Graph, op: int) -> bool:
    return any(graph.tensors[t].role == "parameter" for t in graph.ops[op].inputs)


@dataclass(frozen=True, eq=False)
class Staged:
    """A pipeline with all its parts priced."""

    run: ChosenRun
    request: ResolvedRequest
    pipeline: Pipeline
    links: StageLinks
    layers: Layers
    counts: Sequence[int]  # of layers in each stage
    parts: Sequence[Part]
    untied: Untied
    known: dict[tuple[Part, bool], StagePasses] = field(default_factory=dict)  # of the run
    followed: tuple[Staged, ...] = ()  # by part: whose run each follows, where not all this one's

    @cached_property
    def stages(self) -> list[StagePasses]:
        """Every part; those that are alike are simulated once."""
        first = self.pipeline.devices
        return [
            self._of(k).passes_of(part, is_first=k < first) for k, part in enumerate(self.parts)
        ]

    def _of(self, stage: int) -> Staged:
        """Whose run a stage follows."""
        return self.followed[self.pipeline.device_of(stage)] if self.followed else self

    def passes_of(self, part: Part, *, is_first: bool = True) -> StagePasses:
        """What a part of the model does, simulated once."""
        key = (part, is_first)
        if key not in self.known:
            self.known[key] = self._passes(part, is_first=is_first)
        return self.known[key]

    def _passes(self, part: Part, *, is_first: bool) -> StagePasses:
        schedule = reduced_after(self.run.schedule_part(part, is_first=is_first))
        graph = self.run.graph
        back = [t for t in part.received(graph) if graph.tensors[t].requires_grad]
        return StagePasses(
            schedule,
            passes(schedule),
            self._weight_seconds(schedule),
            self._message(part.sent(graph)),
            self._message(back, of_gradient=True),
        )

    def _message(self, tensors: Sequence[int], *, of_gradient: bool = False) -> Message:
        """What a device sends of these tensors."""
        layouts = LocalLayouts(self.run.whole.decoded, self.run.case.scheduler.facts)
        found: dict[Axes, float] = {}
        for tensor in tensors:
            row = layouts.crossing_row(tensor)
            copies = copy_axes(row, of_gradient=of_gradient)
            found[copies] = found.get(copies, 0.0) + layouts.crossing_bytes(tensor)
        return found

    def _weight_seconds(self, schedule: Schedule) -> float:
        """Of a usual micro-batch's backward work, what serves the gradients of weights."""
        shares = {op.name: self._weight_share(index) for index, op in enumerate(self.run.graph.ops)}
        return sum(
            task.seconds * (1.0 if task.turn == "later" else shares[op.name]) * segment.count
            for segment in schedule.segments
            for op in segment.operators
            for task in op.backward
            if task.mode == "work" and task.turn != "last"
        )

    def _weight_share(self, index: int) -> float:
        """Of an operator's backward, by how many operands have gradients."""
        graph, rule = self.run.graph, self.run.case.subdims.rules[index].rule
        read = [graph.tensors[t] for t in graph.ops[index].inputs]
        every = rule.backward_passes([t.requires_grad for t in read])
        weights = [t for t in read if t.role == "parameter" and t.requires_grad]
        if not every or not weights:
            return 0.0
        others = [t for t in read if t.role != "parameter" and t.requires_grad]
        return len(weights) / (len(weights) + len(others))

    # Time

    @cached_property
    def times(self) -> list[StageTimes]:
        """Seconds of every stage, for the pipeline's simulator."""
        return [self._times(number, each) for number, each in enumerate(self.stages)]

    def _times(self, number: int, found: StagePasses) -> StageTimes:
        usual, first, last = found.usual, found.passes[0], found.passes[-1]
        forth = self._send_seconds(number, number + 1, found.sent)
        back = self._send_seconds(number, number - 1, found.returned)
        waits = self.run.stack.waits_for_sends and self.pipeline.chunks == 1
        return StageTimes(
            forward=usual.forward_seconds + (forth if waits else 0.0),
            backward=usual.backward_seconds + (back if waits else 0.0),
            weight=found.weight_seconds,
            send_forward=0.0 if waits else forth,
            send_backward=0.0 if waits else back,
            first=first.backward_seconds - usual.backward_seconds,
            last=last.backward_seconds - usual.backward_seconds if len(found.passes) > 1 else 0.0,
            reduce=last.reduce_seconds,
            update=last.update_seconds,
        )

    def _send_seconds(self, source: int, target: int, message: Message) -> float:
        """A message from one stage to the next or the one before."""
        if not 0 <= target < self.pipeline.stages:
            return 0.0
        ends = self.pipeline.device_of(source), self.pipeline.device_of(target)
        if ends[0] == ends[1]:
            return 0.0
        hop = self.links.hop(*ends)
        if self._of(source) is not self._of(target):
            return self._crossed_seconds(hop, source, target)
        own = self._of(source)
        return sum(own._sent_seconds(hop, copies, size) for copies, size in message.items())

    def _crossed_seconds(self, hop: int, source: int, target: int) -> float:
        """A message between parts that follow different choices: sums, tiles, gathers."""
        graph = self.run.graph
        tensors = self.parts[min(source, target)].sent(graph)
        if source > target:
            tensors = [t for t in tensors if graph.tensors[t].requires_grad]
        sides = self._of(source), self._of(target)
        return sum(self._crossing_seconds(hop, t, *sides, source, target) for t in tensors)

    def _crossing_seconds(
        self, hop: int, tensor: int, first: Staged, second: Staged, source: int, target: int
    ) -> float:
        sides = (first, second)
        ends = [each._end(tensor, of_gradient=source > target) for each in sides]
        axes = copies(ends[1])
        own = [second.run.mesh.axes[axis] for axis in axes]
        part = self.pipeline.device_of(target)
        shares = axes if self.links.sends_parts(hop, own, part) else ()
        sizes = self.run.case.subdims.tensors[tensor]
        found = route(tuple(sizes), *ends, shares)
        item = self.run.graph.tensors[tensor].type.item_bytes
        items, count = found.busiest
        each = _seconds(self._model(self.links.between), "halo", (hop,), items * item / count)
        seconds = each * count
        if found.summed:
            size = float(ends[0].items(sizes) * item)
            seconds += _seconds(first.run.model, "all_reduce", found.summed, size)
        if found.gathered:
            size = float(ends[1].items(sizes) * item)
            seconds += _seconds(second.run.model, "all_gather", found.gathered, size)
        return seconds

    def _end(self, tensor: int, *, of_gradient: bool) -> End:
        """How a tensor, or its gradient, lies as it crosses."""
        layouts = LocalLayouts(self.run.whole.decoded, self.run.case.scheduler.facts)
        row = np.array([layouts.crossing_row(tensor)], dtype=np.int8)
        states = gradient_states(row) if of_gradient else forward_states(row)
        return End(tuple(self.run.mesh.shape), tuple(states.reshape(-1).tolist()))

    def _sent_seconds(self, hop: int, copies: Axes, size: float) -> float:
        """Whole from every device; or each copy a part of it, gathered where it arrives.

        Our own runner does the latter where links within a stage are faster; others, where it pays.
        """
        model = self._model(self.links.between)
        whole = _seconds(model, "halo", (hop,), size)
        is_own = self.run.stack is OWN
        axes = [self.run.mesh.axes[axis] for axis in copies]
        if not copies or (is_own and not self.links.sends_parts(hop, axes)):
            return whole
        parts = math.prod(self.run.mesh.axes[axis].size for axis in copies)
        part = _seconds(model, "halo", (hop,), size / parts)
        gathered = part + _seconds(self.run.model, "all_gather", copies, size)
        return gathered if is_own else min(whole, gathered)

    def _model(self, mesh: Mesh) -> CostModel:
        """The prices of messages between stages."""
        return self.request.pricing.model(self.request.cluster, mesh)

    @cached_property
    def tied(self) -> list[tuple[tuple[int, ...], float]]:
        """Devices that share a parameter, and what it takes to sum its gradient over them."""
        found = []
        for (first, *_), stages in zip(self.untied.tied, self.untied.stages, strict=True):
            devices = tuple(sorted({self.pipeline.device_of(s) for s in stages}))
            if len(devices) > 1 and self.run.graph.tensors[first].requires_grad:
                found.append((devices, self._tied_seconds(first, devices)))
        return found

    def _tied_seconds(self, tensor: int, devices: Sequence[int]) -> float:
        """An all-reduce of the gradient over the devices, on the outermost links between them."""
        wiring = self.run.whole.decoded.tables.wiring
        layouts = LocalLayouts(self.run.whole.decoded, self.run.case.scheduler.facts)
        size = layouts.stored_bytes(wiring.storage_vertex[tensor])
        if self.run.stack.float32_reduction:
            size *= FLOAT32 / self.run.graph.tensors[tensor].type.item_bytes
        level = self.links.between.axes[self.links.hop(devices[0], devices[-1])].level
        model = self._model(Mesh((Axis("tied", len(devices), level),)))
        return _seconds(model, "all_reduce", (0,), size)

    @cached_property
    def simulation(self) -> PipelineSimulation:
        """All stages."""
        return run_pipeline(self.pipeline, self.times, self.tied)

    @property
    def bubble(self) -> float:
        """The share of all devices' time in which they have nothing to do."""
        sizes, found = self.links.sizes, self.simulation
        busy = sum(size * each for size, each in zip(sizes, found.busy_seconds, strict=True))
        return max(0.0, 1 - busy / (found.step_seconds * sum(sizes)))

    @property
    def step_seconds(self) -> float:
        """Of the pipeline."""
        return self.simulation.step_seconds

    @property
    def send_seconds(self) -> float:
        """Of the messages of the mean device."""
        return (
            self._mean(
                self._send_seconds(k, k + 1, each.sent)
                + self._send_seconds(k, k - 1, each.returned)
                for k, each in enumerate(self.stages)
            )
            * self.pipeline.micro_batches
        )

    @property
    def exposed_send_seconds(self) -> float:
        """By how much the step is shorter if messages take no time."""
        free = [
            replace(
                each,
                forward=stage.usual.forward_seconds,
                backward=stage.usual.backward_seconds,
                send_forward=0.0,
                send_backward=0.0,
            )
            for each, stage in zip(self.times, self.stages, strict=True)
        ]
        return self.step_seconds - run_pipeline(self.pipeline, free, self.tied).step_seconds

    @property
    def compute_seconds(self) -> float:
        """Local work of the mean device."""
        return self._mean(whole_step(each.passes).compute_seconds for each in self.stages)

    @property
    def collectives(self) -> list[tuple[Exposed, float]]:
        """Those inside stages, with the share of the devices that run them."""
        sizes = self.links.sizes
        return [
            (each, sizes[self.pipeline.device_of(number)] / sum(sizes))
            for number, stage in enumerate(self.stages)
            for each in whole_step(stage.passes).collectives
        ]

    def _mean(self, values: Iterator[float]) -> float:
        """Over all devices, of what one device of every stage has."""
        sizes = self.links.sizes
        each = (value * sizes[self.pipeline.device_of(s)] for s, value in enumerate(values))
        return sum(each) / sum(sizes)

    @property
    def totals(self) -> dict[str, float]:
        """Seconds of all stages one after the other: of work, of communication, of the update."""
        steps = [whole_step(each.passes) for each in self.stages]
        return {
            "compute": sum(each.compute_seconds for each in steps),
            "communication": sum(c.seconds for each in steps for c in each.collectives),
            "update": sum(each.update for each in self.times),
        }

    # Work

    @property
    def peak_flops(self) -> float:
        """Of a device."""
        return self.stages[0].schedule.peak_flops

    @property
    def flops(self) -> float:
        """The useful ones of a step, of the mean device."""
        each = self._mean(each.schedule.flops for each in self.stages)
        return each * self.pipeline.micro_batches

    @property
    def flops_again(self) -> float:
        """Those of products that are computed again."""
        each = self._mean(
            self._of(number).run.recomputed_flops(each.schedule)
            for number, each in enumerate(self.stages)
        )
        return each * self.pipeline.micro_batches

    # Memory

    @cached_property
    def peaks(self) -> list[Bytes]:
        """The most that each device holds, by class."""
        return [self._peak(device) for device in range(self.pipeline.devices)]

    def _peak(self, device: int) -> Bytes:
        own = self.pipeline.stages_on(device)
        resident = _summed([(self.stages[s].schedule.resident, 1.0) for s in own])
        passing = {s: self._passing(s) for s in own}
        kept = {s: self.stages[s].usual.kept for s in own}
        sizes = {s: (sum(passing[s].values()), sum(kept[s].values())) for s in own}
        best: tuple[float, int, dict[int, int]] = (-1.0, own[0], {})
        for at, count in held(self.pipeline, device):
            total = sizes[at][0] - sizes[at][1] + sum(n * sizes[s][1] for s, n in count.items())
            if total > best[0]:
                best = (total, at, dict(count))
        _, at, count = best
        count[at] -= 1
        beside = [(kept[s], float(n)) for s, n in count.items()]
        in_pass = _summed([(resident, 1.0), (passing[at], 1.0), *beside])
        copies = {"optimizer": sum(self.stages[s].schedule.updating for s in own)}
        in_update = _summed([(resident, 1.0), (copies, 1.0)])
        return max(in_pass, in_update, key=lambda each: sum(each.values()))

    def _passing(self, number: int) -> Bytes:
        """What a usual pass takes at its peak, beyond what is always there."""
        found = self.stages[number]
        peak = found.usual.simulation.peak_by_class
        always = found.schedule.resident
        return {kind: size - always.get(kind, 0.0) for kind, size in peak.items()}

    @property
    def pipelined(self) -> Pipelined:
        """The figures of every stage."""
        found, listed = self.simulation, []
        for device in range(self.pipeline.devices):
            own = self.pipeline.stages_on(device)
            most = max(sum(count.values()) for _, count in held(self.pipeline, device))
            listed.append(
                EstimatedStage(
                    layers=in_words(self.layers, self.counts, own),
                    forward_seconds=sum(self.times[s].forward for s in own),
                    backward_seconds=sum(self.times[s].backward for s in own),
                    busy_seconds=found.busy_seconds[device],
                    in_flight=most,
                    peak_bytes=sum(self.peaks[device].values()),
                )
            )
        return Pipelined(self.pipeline.schedule, self.bubble, tuple(listed))


def _seconds(model: CostModel, kind: Kind, axes: Axes, size: float) -> float:
    """Of one collective or message."""
    row = np.zeros(1, dtype=np.intp)
    step = Collective("forward", kind, axes, row, np.array([size]))
    return float(model.collective_seconds(step)[0])


def _summed(each: Sequence[tuple[Bytes, float]]) -> dict[str, float]:
    """Bytes of each class, each so many times."""
    total: dict[str, float] = {}
    for sizes, times in each:
        for kind, size in sizes.items():
            total[kind] = total.get(kind, 0.0) + times * size
    return {kind: size for kind, size in total.items() if size}
