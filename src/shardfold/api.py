"""The pipeline on one screen: from a module and a cluster to the best plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardfold import gc_pause
from shardfold.cluster import Cluster, Mesh, mesh_from_text, parse
from shardfold.costs import Profile, optimizer_named, pricing_of
from shardfold.costs.models.measured import check_profile
from shardfold.errors import InputError, nearest
from shardfold.operators import Maker
from shardfold.planner.capture_cache import Captures
from shardfold.planner.mesh_search import RECOMPUTE, Recompute
from shardfold.planner.micro_batches import MicroBatches, check_wish, decided
from shardfold.planner.planner import Decision, decide
from shardfold.planner.request import Request
from shardfold.plans import Plan
from shardfold.plans.build import describe
from shardfold.progress import Stage, Watch, ignore
from shardfold.search.npz import write_problem
from shardfold.strategies.pins import parse_pins

if TYPE_CHECKING:
    from torch import nn


Pins = Mapping[str, str] | Iterable[str] | None  # {pattern: split}, or texts "pattern=split"


@gc_pause.paused()
def plan(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: str | Cluster,
    dtype: str | None = None,
    optimizer: str = "adamw",
    mesh: str | Mesh | None = None,
    cost: str = "roofline",
    profile: str | Path | Profile | None = None,
    memory_limit: float | None = None,
    recompute: Recompute = "auto",
    micro_batches: MicroBatches = "auto",
    pins: Pins = None,
    loss: Callable[[Any], Any] | None = None,
    rules: Mapping[str, Maker] | None = None,
    fold: bool = True,
    save_problem: str | Path | None = None,
    watch: Watch = ignore,
) -> Plan:
    """Find the fastest way to train `model` on `cluster` that fits in its memory.

    `args` and `kwargs` are an example batch, as `model` takes it; nothing is run and no weight is
    allocated. `cluster` is a name such as `4x8xh100`, a path to a cluster file, or a `Cluster`.
    `mesh` (such as `4x8`) fixes what is otherwise tried. `profile`, a file that `shardfold
    calibrate` wrote, prices by what a machine was measured to take. `memory_limit` is in bytes per
    device; by default it is the device's memory less a tenth. `recompute` says whether repeated
    blocks drop their activations and make them again in backward: `auto` where that fits what would
    not, or not as fast; `never`; `always`. `micro_batches` are the equal parts in which a step
    takes its batch, adding gradients up: `auto`, more than one only where nothing fits otherwise;
    `search`, the fastest number where the limit binds; or a number. `pins` fixes splits, such as
    `{"layers.*.mlp.up": "out/8"}`; the plan says what they cost. `loss` turns the model's output
    into a scalar where the model does not. `rules` adds rules for operators that shardfold does
    not know. Without `fold`, repeated blocks are traced one by one: slower, with the same sum, but
    then some of them may store their parameters otherwise than others.
    `save_problem` writes the winning mesh's search problem to a file, for `shardfold solve`.
    """
    target = parse(cluster) if isinstance(cluster, str) else cluster
    meshes = _meshes(target, mesh)
    notes = set[str]()
    cost, pricing = pricing_of(cost, profile, notes)
    updates, fixed = optimizer_named(optimizer), parse_pins(pins)
    if recompute not in RECOMPUTE:
        raise InputError(f"Unknown recompute {recompute!r}. {nearest(recompute, RECOMPUTE)}")
    check_wish(micro_batches)

    request = Request(target, meshes, pricing, updates, memory_limit, fixed, recompute, rules or {})
    captures = Captures(
        model,
        args,
        kwargs,
        request.subdims_of,
        lambda: watch(Stage("capture", 0, 1)),
        dtype=dtype,
        loss=loss,
        fold=fold,
        short=fold and not fixed,  # a pin may tell apart what a short graph takes together
    )

    def attempt(passes: int) -> Decision:
        graph = captures.graph(passes)
        if pricing.profile is not None:
            check_profile(pricing.profile, target, graph)
        stage = "search" if passes == 1 else f"searching with {passes} micro-batches"
        asked = replace(request, passes=passes)
        return decide(graph, asked, lambda done, total: watch(Stage(stage, done, total)))

    started = time.perf_counter()
    settled = decided(micro_batches, attempt, lambda: captures.samples)
    searched = time.perf_counter()
    won = settled.chosen.best
    if save_problem is not None:
        meta = {"cluster": target.name, "mesh": str(won.mesh), "unit": "seconds"}
        write_problem(won.unfolded.problem, save_problem, meta=meta)

    watch(Stage("describe", 0, 1))
    return describe(
        settled.graph,
        settled.subdims,
        target,
        settled.chosen,
        updates,
        cost=cost,
        dtype=dtype,
        capture_seconds=captures.seconds,
        search_seconds=searched - started - captures.seconds,
        verdict=settled.verdict,
        cuts=captures.cuts(won.tabulated.passes),
    ).noted(*sorted(notes))


def _meshes(cluster: Cluster, mesh: str | Mesh | None) -> tuple[Mesh, ...]:
    if mesh is None:
        return cluster.meshes()
    return (mesh_from_text(mesh, cluster) if isinstance(mesh, str) else mesh,)
