"""The plan against strategies by hand, in the simulator; the limit at its threshold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold import zoo
from shardfold.capture import capture, capture_short
from shardfold.cluster import parse
from shardfold.costs import optimizer_named, pricing_named
from shardfold.errors import InfeasibleError
from shardfold.planner.case import ResolvedRequest, Source, simulate
from shardfold.planner.planner import select_for
from shardfold.planner.proposals import list_baselines
from shardfold.simulate import simulate as run_schedule
from shardfold.simulate import timeline
from shardfold.strategies.baselines import STRATEGIES
from shardfold.strategies.pins import Pin

ADAMW = optimizer_named("adamw")
ROOFLINE = pricing_named("roofline")


class Layers(nn.Module):
    def __init__(self, width: int = 256, count: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def select(module, args, kwargs, cluster, limit=None, *, short=True):
    take = capture_short if short else capture
    graph = take(module, args, kwargs)
    target = parse(cluster)
    request = ResolvedRequest(target, target.meshes(), ROOFLINE, ADAMW, limit)
    return select_for(graph, request, lambda done, total: None)


def share_of(peak: float, share: float) -> float:
    """A limit that leaves a share of a peak, and the workspace that no plan can do without."""
    workspace = parse("4xh100").device.workspace_bytes
    return workspace + share * (peak - workspace)


@pytest.fixture(scope="module")
def layers():
    return Layers(), (torch.zeros(64, 256),), {}


@pytest.fixture(scope="module")
def unlimited(layers):
    return select(*layers, "2x4xh100")


def test_no_baseline_that_fits_is_faster(unlimited) -> None:
    limit = unlimited.limit_bytes
    everyone = [simulate(c) for c in list_baselines(unlimited.searched, limit)]
    assert {c.label for c in everyone} >= {"data-parallel", "zero-2", "fsdp"}
    for candidate in everyone:
        if candidate.peak_bytes <= limit:
            assert unlimited.winner.seconds <= candidate.seconds * (1 + 1e-9)


def test_a_step_is_never_shorter_than_its_floor(unlimited) -> None:
    for candidate in unlimited.simulated:
        step, floor, total = candidate.seconds, candidate.floor_seconds, candidate.solution.cost
        assert floor * (1 - 1e-9) <= step <= total * (1 + 1e-9)  # overlap never adds to the sum


def test_memory_comes_back_and_the_folded_step_is_the_walked_one(unlimited) -> None:
    for candidate in unlimited.simulated:
        schedule = candidate.schedule()
        figures, over_time = timeline(schedule)
        assert figures.step_seconds == pytest.approx(candidate.seconds, rel=1e-9)
        assert figures.peak_bytes == pytest.approx(candidate.peak_bytes, rel=1e-9)
        left = over_time.memory[-1].bytes
        for kind, size in left.items():
            assert size == pytest.approx(schedule.resident.get(kind, 0.0), abs=64)


def test_a_short_graph_is_simulated_like_the_whole(layers, unlimited) -> None:
    whole = select(*layers, "2x4xh100", short=False)
    short, full = unlimited.winner.simulation, whole.winner.simulation
    assert short.step_seconds == pytest.approx(full.step_seconds, rel=1e-9)
    assert short.peak_bytes == pytest.approx(full.peak_bytes, rel=1e-9)


def small():
    return Layers(64, 2), (torch.zeros(32, 64),), {}


def needed_bytes(limit: float) -> float:
    """What a refusal says is needed."""
    with pytest.raises(InfeasibleError) as refused:
        select(*small(), "4xh100", limit)
    assert f"{refused.value.needed_bytes:,.0f} bytes" in str(refused.value)
    return refused.value.needed_bytes


def peak_bytes(limit: float) -> float:
    return select(*small(), "4xh100", limit).winner.simulation.peak_bytes


def test_a_limit_is_met_at_the_smallest_plan_and_refused_one_byte_below() -> None:
    smallest = needed_bytes(1.0)
    reached = peak_bytes(smallest)
    assert reached == smallest
    assert needed_bytes(smallest - 1) == smallest


def test_a_plan_keeps_its_peak_below_a_limit_that_binds(layers, unlimited) -> None:
    free = unlimited.winner.simulation
    limit, before = share_of(free.peak_bytes, 0.8), free.step_seconds
    found = select(*layers, "2x4xh100", limit).winner.simulation
    peak, after = found.peak_bytes, found.step_seconds
    assert peak <= limit
    assert after >= before * (1 - 1e-9)


def test_whatever_is_simulated_under_pins_follows_them() -> None:
    graph, cluster = capture(*small()), parse("4xh100")
    pins = [Pin.parse("layers.*.0", "unsplit")]
    request = ResolvedRequest(cluster, cluster.meshes()[:1], ROOFLINE, ADAMW, pins=pins)
    free = select_for(graph, request, lambda done, total: None)
    limited = replace(request, limit_bytes=share_of(free.winner.peak_bytes, 0.8))
    found = select_for(graph, limited, lambda done, total: None)
    assert {c.source for c in found.simulated} >= {Source.SEARCH, Source.OVERLAP}
    for candidate in found.simulated:
        for vertex, rows in candidate.case.allowed.kept.items():
            assert candidate.choice[vertex] in rows


def test_many_devices_cost_what_few_cost() -> None:
    """All devices do the same, so a schedule does not grow with their number."""
    sizes = []
    for cluster in ("8xh100", "2048x8xh100"):
        module, args, kwargs = zoo.build("llama3-8b-tiny", batch=16384)
        plan = sf.plan(module, args, kwargs, cluster=cluster)
        assert plan.schedule is not None
        sizes.append(sum(len(s.operators) for s in plan.schedule.segments))
        assert run_schedule(plan.schedule).step_seconds == pytest.approx(
            plan.simulation.step_seconds
        )
    assert sizes[1] <= 1.2 * sizes[0]


def test_the_paper_s_costs_know_no_overlap(layers) -> None:
    module, args, kwargs = layers
    plan = sf.plan(module, args, kwargs, cluster="2x4xh100", cost="paper")
    assert plan.simulation is None
    assert plan.finalists == ()


def test_every_field_of_a_finalist_is_in_the_plan(layers) -> None:
    module, args, kwargs = layers
    plan = sf.plan(module, args, kwargs, cluster="2x4xh100", prefer="speed")
    best = plan.finalists[0]
    assert best.step_seconds == plan.simulation.step_seconds
    assert plan.estimate.peak_bytes == plan.simulation.peak_bytes
    assert {f.name for f in plan.finalists} & set(STRATEGIES)
    assert "simulated with overlap" in str(plan)
    assert sum(plan.simulation.peak_by_class.values()) == pytest.approx(plan.estimate.peak_bytes)


def test_an_8b_model_on_8_devices_is_not_split_by_features() -> None:
    """Plain sharding is what is fastest there in practice: no layer may be tensor parallel."""
    module, args, kwargs = zoo.build("llama3-8b", batch=8, seq=8192)
    plan = sf.plan(module, args, kwargs, cluster="8xh100", dtype="bf16", optimizer="adamw")
    assert plan.fits
    inside = [op for op in plan.operators if ".layers." in op.name]
    assert inside
    for op in inside:
        assert set(op.split) <= {"batch"}, f"{op.name} is split {op.split}"
    simulated = {f.name: f.step_seconds for f in plan.finalists}
    assert plan.simulation.step_seconds <= simulated["fsdp"] * (1 + 1e-9)


def test_no_mesh_alone_gives_a_faster_plan_than_all_meshes_together() -> None:
    module, args, kwargs = zoo.build("llama3-405b", layers=16, batch=32, seq=8192)
    together, alone = (
        sf.plan(module, args, kwargs, cluster="8x8xh100", dtype="bf16", mesh=mesh)
        for mesh in (None, "8x2x4")
    )
    assert together.simulation is not None
    assert alone.simulation is not None
    assert together.simulation.step_seconds <= alone.simulation.step_seconds
