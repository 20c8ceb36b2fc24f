"""What a stated strategy comes to: its step, its memory, and what communication it waits for.

The splits are priced and simulated as the planner's own; what ZeRO and the stack that runs it
change is in `as_run.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardfold.costs.activations import KEEP_ALL, Regions, attention_regions, block_regions
from shardfold.costs.tables import EdgePrices
from shardfold.errors import InputError
from shardfold.graph import Graph
from shardfold.planner.as_run import as_run, float32_optimizer, parameter_type, prices
from shardfold.planner.batch_slices import items_in
from shardfold.planner.case import Case, ResolvedRequest, make_case
from shardfold.simulate import Schedule, Simulation
from shardfold.simulate import simulate as run_schedule
from shardfold.simulate.tasks import Scheduler
from shardfold.strategies.baselines import Setting
from shardfold.strategies.stacks import OWN, Stack
from shardfold.strategies.stated import Stated, choose_stated, place


@dataclass(frozen=True, slots=True)
class Communication:
    """Collectives of one kind: how long they run in a step, and how long work waits for them."""

    kind: str
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True, slots=True)
class Estimated:
    """The figures of a stated strategy on one cluster, per device where nothing else is said.

    `rate` is tokens or samples (`unit`) in a second over all devices. `hfu` counts recomputed
    work, `mfu` does not. `plan_seconds` and `plan_bytes` are of the plan beside it, if one was
    asked for and found.
    """

    strategy: str
    cluster: str
    devices: int
    mesh: str
    step_seconds: float
    compute_seconds: float
    rate: float
    unit: str
    mfu: float
    hfu: float
    peak_bytes: float
    peak_by_class: Mapping[str, float]
    limit_bytes: float
    communication: tuple[Communication, ...]
    plan_seconds: float | None = None
    plan_bytes: float | None = None

    @property
    def fits(self) -> bool:
        """Whether the peak is within the limit."""
        return self.peak_bytes <= self.limit_bytes

    @property
    def exposed_seconds(self) -> float:
        """How long work waits for communication."""
        return sum(each.exposed_seconds for each in self.communication)

    @property
    def rate_per_device(self) -> float:
        """Tokens or samples in a second, of one device."""
        return self.rate / self.devices

    def as_plain(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        plain = asdict(self)
        return {
            **plain,
            "peak_by_class": dict(self.peak_by_class),
            "rate_per_device": self.rate_per_device,
            "exposed_seconds": self.exposed_seconds,
            "fits": self.fits,
        }


def estimate(
    graph: Graph, request: ResolvedRequest, stated: Stated, stack: Stack = OWN
) -> Estimated:
    """Price a strategy as a stack runs it; `graph` is of one of its micro-batches."""
    if not request.pricing.overlaps:
        raise InputError("A step is estimated with overlap, which these costs do not know.")
    placed = place(stated, request.cluster)
    kind = parameter_type(graph)
    item_bytes = kind.item_bytes
    asked = replace(
        request,
        meshes=(placed.mesh,),
        micro_batches=stated.micro_batches,
        optimizer=float32_optimizer(request.optimizer, stack, item_bytes),
    )
    scheduler = Scheduler(
        graph,
        request.subdims_of(graph),
        request.cluster,
        regathers=stack.regathers_activations,
    )
    plain = request.pricing.model(request.cluster, placed.mesh)
    model = prices(plain, stack, placed, request.cluster.device, kind)
    regions = _recomputed(scheduler, stated, stack)
    case = make_case(
        asked, scheduler, EdgePrices(placed.mesh, model, stated.micro_batches), regions
    )
    setting = Setting(graph, scheduler.subdims, case.tables, request.limit, case.unrolled)
    choice = choose_stated(setting, stated, placed)
    schedule = scheduler.schedule(case.decode(case.unrolled.extended(choice).tolist()))
    schedule = as_run(schedule, stated, placed, stack, model, item_bytes)
    return _figures(case, stated, schedule, run_schedule(schedule))


def _recomputed(scheduler: Scheduler, stated: Stated, stack: Stack) -> Regions:
    """What backward computes again."""
    if stated.recompute == "none":
        return KEEP_ALL
    if stated.recompute == "selective":
        cores = attention_regions(scheduler.graph, scheduler.subdims)
        if not cores:
            raise InputError("recompute=selective: no block of the model has attention.")
        return cores
    blocks = block_regions(scheduler.graph, scheduler.subdims)
    if not blocks:
        raise InputError("recompute=full: the model has no repeated blocks to recompute.")
    return Regions(blocks.ranges) if stack.runs_whole_block_again else blocks


def _figures(case: Case, stated: Stated, schedule: Schedule, found: Simulation) -> Estimated:
    kinds: dict[str, list[float]] = {}
    for each in found.collectives:
        total = kinds.setdefault(each.kind, [0.0, 0.0])
        total[0] += each.seconds
        total[1] += each.exposed_seconds
    listed = tuple(Communication(kind, *total) for kind, total in sorted(kinds.items()))
    inputs = (t.type for t in case.graph.tensors if t.role == "input" and t.type.shape)
    first = next(inputs, None)
    count, unit = (1, "steps") if first is None else items_in(first.dtype, first.shape)
    useful = schedule.flops
    again = _recomputed_flops(case, schedule) / case.mesh.size
    return Estimated(
        strategy=str(stated),
        cluster=case.request.cluster.name,
        devices=case.mesh.size,
        mesh=str(case.mesh),
        step_seconds=found.step_seconds,
        compute_seconds=found.compute_seconds,
        rate=count * stated.micro_batches / found.step_seconds,
        unit=unit,
        mfu=found.mfu,
        hfu=found.mfu * (1 + again / useful) if useful else found.mfu,
        peak_bytes=found.peak_bytes,
        peak_by_class=found.peak_by_class,
        limit_bytes=case.request.limit,
        communication=listed,
    )


def _recomputed_flops(case: Case, schedule: Schedule) -> float:
    """FLOP of the products that backward computes again, over all devices once."""
    rules = {
        op.name: rule.rule for op, rule in zip(case.graph.ops, case.subdims.rules, strict=True)
    }
    names = [
        (again.name, segment.count)
        for segment in schedule.segments
        for op in segment.operators
        for again in op.again
    ]
    return sum(
        rules[name].flops * rules[name].points * count
        for name, count in names
        if rules[name].engine == "matrix"
    )
