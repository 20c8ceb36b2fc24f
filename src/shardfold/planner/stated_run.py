"""A stated strategy on one mesh, as a stack runs it: the schedules of a model and of its parts.

The splits are priced as the planner's own; what ZeRO and the stack that runs it change is in
`as_run.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardfold.cluster import Mesh
from shardfold.costs import CostModel
from shardfold.costs.activations import (
    KEEP_ALL,
    Regions,
    attention_regions,
    block_regions,
    product_regions,
)
from shardfold.costs.tables import EdgePrices
from shardfold.errors import InputError
from shardfold.graph import Graph
from shardfold.planner.as_run import as_run, float32_optimizer, parameter_type, prices
from shardfold.planner.case import Case, ResolvedRequest, make_case
from shardfold.sharding import Subdims
from shardfold.simulate import Schedule
from shardfold.simulate.decoded import UnrolledChoice
from shardfold.simulate.parts import Part
from shardfold.simulate.tasks import OperatorTasks, Scheduler
from shardfold.strategies.baselines import Setting
from shardfold.strategies.split_preferences import Roles
from shardfold.strategies.stacks import OWN, Stack
from shardfold.strategies.stated import Placed, Stated, choose_stated, place


@dataclass(frozen=True)
class ChosenRun:
    """A model under a choice of splits; of a pipeline, all stages on the mesh that each has."""

    case: Case
    whole: UnrolledChoice
    stack: Stack = OWN

    @property
    def graph(self) -> Graph:
        """Of one micro-batch."""
        return self.case.graph

    @property
    def mesh(self) -> Mesh:
        """That of a stage."""
        return self.case.mesh

    @property
    def model(self) -> CostModel:
        """The prices of the stack."""
        return self.case.cost_model

    def schedule_part(self, part: Part, *, is_first: bool = True) -> Schedule:
        """A part of it; buffers of a fixed size are with the first of a device."""
        return self.case.scheduler.schedule_part(self.whole, part, is_first=is_first)

    def recomputed_flops(self, schedule: Schedule) -> float:
        """FLOP of the products that backward computes again, on one device."""
        rules = {
            op.name: rule.rule
            for op, rule in zip(self.graph.ops, self.case.subdims.rules, strict=True)
        }
        names = [
            (again.name, segment.count)
            for segment in schedule.segments
            for op in segment.operators
            for again in op.again
        ]
        total = sum(
            rules[name].flops * rules[name].points * count
            for name, count in names
            if rules[name].engine == "matrix"
        )
        return total / self.mesh.size


@dataclass(frozen=True)
class StatedRun(ChosenRun):
    """A model under a stated strategy, as its stack runs it."""

    stated: Stated = field(kw_only=True)
    placed: Placed = field(kw_only=True)

    @property
    def item_bytes(self) -> int:
        """Of an item of most parameters."""
        return parameter_type(self.graph).item_bytes

    def schedule(self) -> Schedule:
        """The whole model."""
        return self._as_run(self.case.scheduler.schedule(self.whole), self.stack)

    def schedule_part(self, part: Part, *, is_first: bool = True) -> Schedule:
        """A part of it; buffers of a fixed size are with the first of a device."""
        stack = self.stack if is_first else replace(self.stack, buffer_bytes=0.0)
        return self._as_run(super().schedule_part(part, is_first=is_first), stack)

    def _as_run(self, schedule: Schedule, stack: Stack) -> Schedule:
        how = (self.stated, self.placed, stack, self.model, self.item_bytes)
        return as_run(schedule, *how, self._routed)

    @cached_property
    def _routed(self) -> dict[str, dict[str, float]]:
        """What is always there of every block of experts that rows are sent to."""
        if self.stated.experts == 1:
            return {}
        ops = Roles.of(self.graph, self.case.subdims).routed
        scheduler, whole = self.case.scheduler, Part.whole(self.graph)
        tasks = OperatorTasks(self.whole.decoded, scheduler.facts, scheduler.useful_flops, whole)
        return {self.graph.ops[op].name: tasks.resident(op) for op in ops}


Run = Callable[[Graph, ResolvedRequest, Stated, Stack], StatedRun]
Keep = Callable[[object, Callable[[], EdgePrices]], EdgePrices]  # by a key; or makes them


def _anew(_key: object, make: Callable[[], EdgePrices]) -> EdgePrices:
    return make()


def run_stated(
    graph: Graph,
    request: ResolvedRequest,
    stated: Stated,
    stack: Stack,
    scheduler: Scheduler | None = None,
    keep: Keep = _anew,
) -> StatedRun:
    """Choose what a strategy states; `graph` is of one of its micro-batches.

    `scheduler` is of the graph and the cluster, for those who have one; `keep` has the prices of
    strategies that differ in what they recompute, or in how attention is split.
    """
    placed = place(stated, request.cluster)
    kind = parameter_type(graph)
    asked = replace(
        request,
        meshes=(placed.mesh,),
        micro_batches=stated.micro_batches,
        optimizer=float32_optimizer(request.optimizer, stack, kind.item_bytes),
    )
    scheduler = scheduler or scheduler_of(graph, request, stack, request.subdims_of(graph))
    plain = request.pricing.model(request.cluster, placed.mesh)
    model = prices(plain, stack, placed, request.cluster.device, graph, stated.stages)
    regions = _recomputed(scheduler, stated, stack)
    degrees = (placed.mesh, placed.data, stated.stages, stated.micro_batches)
    edges = keep(
        (id(graph), request.cluster, stack, *degrees),
        lambda: EdgePrices(placed.mesh, model, stated.micro_batches),
    )
    case = make_case(asked, scheduler, edges, regions)
    setting = Setting(graph, scheduler.subdims, case.tables, request.limit, case.unrolled)
    choice = choose_stated(setting, stated, placed)
    whole = case.decode(case.unrolled.extended(choice).tolist())
    return StatedRun(case, whole, stack, stated=stated, placed=placed)


def scheduler_of(
    graph: Graph, request: ResolvedRequest, stack: Stack, subdims: Subdims
) -> Scheduler:
    """What makes schedules of a graph, as a stack runs them."""
    return Scheduler(graph, subdims, request.cluster, regathers=stack.regathers_activations)


def _recomputed(scheduler: Scheduler, stated: Stated, stack: Stack) -> Regions:
    """What backward computes again."""
    if stated.recompute == "none":
        return KEEP_ALL
    if stated.recompute == "selective":
        cores = attention_regions(scheduler.graph, scheduler.subdims, whole=True)
        if not cores:
            raise InputError("recompute=selective: no block of the model has attention.")
        return cores
    if stated.recompute == "products":
        others = product_regions(scheduler.graph, scheduler.subdims)
        if not others:
            raise InputError("recompute=products: the model has no repeated blocks with products.")
        return others
    whole = stack.runs_whole_block_again
    blocks = block_regions(scheduler.graph, scheduler.subdims, whole=whole)
    if not blocks:
        raise InputError("recompute=full: the model has no repeated blocks to recompute.")
    return blocks
