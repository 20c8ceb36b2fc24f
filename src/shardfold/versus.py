"""Hold the best plan of a model against strategies by hand and other searches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shardfold import gc_pause
from shardfold.cluster import Cluster, Mesh, mesh_from_text, parse
from shardfold.costs import Profile, optimizer_named, pricing_of
from shardfold.costs.models.measured import check_profile
from shardfold.operators import Maker, rules_of
from shardfold.planner.method_comparison import (
    METHODS,
    Contest,
    Effort,
    Result,
    check_methods,
    speedups,
)
from shardfold.planner.planner import decide
from shardfold.planner.request import Request
from shardfold.planner.select import Judge
from shardfold.plans import Plan
from shardfold.plans.build import describe
from shardfold.progress import Stage, Watch, ignore
from shardfold.sharding import find_subdims

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Comparison:
    """What each method came to on one model and cluster: its sum, and its simulated step."""

    cluster: str
    cost: str
    optimizer: str
    dtype: str
    limit_bytes: float
    operators: int
    tables_seconds: float  # making the tables on every mesh, and the exact search on them
    results: tuple[Result, ...]

    @property
    def speedups(self) -> Mapping[str, float]:
        """How many times faster than data parallel each method's step is."""
        return speedups(self.results)

    def as_plain(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        plain = asdict(self)
        over = self.speedups
        plain["results"] = [{**asdict(r), "speedup": over.get(r.method)} for r in self.results]
        return plain


@gc_pause.paused()
def compare(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: str | Cluster,
    methods: Sequence[str] = METHODS,
    dtype: str | None = None,
    optimizer: str = "adamw",
    mesh: str | Mesh | None = None,
    cost: str = "roofline",
    profile: str | Path | Profile | None = None,
    memory_limit: float | None = None,
    loss: Callable[[Any], Any] | None = None,
    rules: Mapping[str, Maker] | None = None,
    effort: Effort | None = None,
    save_plans: str | Path | None = None,
    watch: Watch = ignore,
) -> Comparison:
    """Hold the plan, strategies by hand and other searches against one another.

    The arguments are those of `plan`. `methods` are names of `METHODS`; `effort` bounds what the
    other searches may spend. The simulated step judges: the plan's is no longer than that of any
    strategy by hand that fits in memory. `exact` is the best sum.
    `save_plans` is a folder that gets a plan of every method that has one: `megatron.json`.
    """
    from shardfold.capture import capture

    check_methods(methods)
    target = parse(cluster) if isinstance(cluster, str) else cluster
    fixed = mesh_from_text(mesh, target) if isinstance(mesh, str) else mesh
    cost, pricing = pricing_of(cost, profile, set())
    updates = optimizer_named(optimizer)

    watch(Stage("capture", 0, 1))
    begin = time.perf_counter()
    graph = capture(model, args, kwargs, dtype=dtype, loss=loss)
    if pricing.profile is not None:
        check_profile(pricing.profile, target, graph)
    subdims = find_subdims(graph, rules_of(graph, {**pricing.rules, **(rules or {})}))
    captured = time.perf_counter() - begin
    begin = time.perf_counter()
    meshes = target.meshes() if fixed is None else (fixed,)
    request = Request(target, meshes, pricing, updates, memory_limit, rules=rules or {})
    decision = decide(graph, request, lambda done, total: watch(Stage("search", done, total)))
    chosen = decision.searched or decision.chosen
    searched = time.perf_counter() - begin
    judge = Judge(target, updates) if pricing.overlaps else None
    contest = Contest(graph, subdims, chosen, updates, effort or Effort(), decision, judge)
    results = contest.results(methods, lambda done, total: watch(Stage("comparing", done, total)))
    if save_plans is not None:
        watch(Stage("describe", 0, 1))
        made = {"cost": cost, "dtype": dtype, "capture_seconds": captured}
        _save(contest, results, target, Path(save_plans), {**made, "search_seconds": searched})
    return Comparison(
        cluster=target.name,
        cost=cost,
        optimizer=optimizer,
        dtype=dtype or "as in the model",
        limit_bytes=chosen.limit_bytes,
        operators=len(graph.ops),
        tables_seconds=searched,
        results=results,
    )


def _save(
    contest: Contest,
    results: Sequence[Result],
    cluster: Cluster,
    folder: Path,
    made: Mapping[str, Any],
) -> None:
    """Write a plan of every method that came to something."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (r.method for r in results if r.step_seconds is not None):
        chosen = contest.chosen_by(name)
        plan = describe(contest.graph, contest.subdims, cluster, chosen, contest.optimizer, **made)
        _noted(plan, f"Chosen by {name}.").save(folder / f"{name}.json")


def _noted(plan: Plan, note: str) -> Plan:
    """The plan with a note before the others."""
    made = msgspec.structs.replace(plan.provenance, notes=(note, *plan.provenance.notes))
    return msgspec.structs.replace(plan, provenance=made)
