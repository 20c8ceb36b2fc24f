"""Questions about a plan: why is an operator split so, and what if something else changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import isclose
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardfold import gc_pause
from shardfold.api import plan as find_plan
from shardfold.cluster import Cluster, mesh_from_text, parse
from shardfold.cluster.parse import from_plain
from shardfold.costs import Pricing, Profile, optimizer_named, pricing_of
from shardfold.errors import ClusterError, InputError, PlanError
from shardfold.explanation.explain import case_of, mesh_of
from shardfold.explanation.explain import explain as reasons
from shardfold.explanation.sensitivity import Asker, Setting
from shardfold.explanation.types import Explanation, Kept, WhatIf
from shardfold.graph import Graph
from shardfold.operators import Maker, rules_of
from shardfold.planner.mesh_search import RESERVE
from shardfold.plans import Plan, check
from shardfold.plans.batch import example_for
from shardfold.plans.read import restated
from shardfold.progress import Stage, Watch, ignore
from shardfold.sharding import Subdims, find_subdims
from shardfold.simulate import simulate
from shardfold.simulate.tasks import Scheduler

if TYPE_CHECKING:
    from torch import nn

AS_IN_MODEL = "as in the model"  # what a plan says whose dtype was not given


@gc_pause.paused()
def explain(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan,
    profile: str | Path | Profile | None = None,
    op: str | None = None,
    everything: bool = False,
    seconds: float = 0.0,
    loss: Callable[[Any], Any] | None = None,
    rules: Mapping[str, Maker] | None = None,
    watch: Watch = ignore,
) -> Explanation:
    """Why `plan` splits operators of `model` as it does: what any other split would cost.

    `op` names modules by their paths, with `*` and `?`, or an operator by its name; without it
    the slowest operators are explained. Every other split of an operator is priced exactly, with
    everything else chosen anew around it, on the plan's mesh and within its memory limit.
    `everything` explains each operator that matches, small ones and repeated ones, too. For about
    `seconds`, what would have to change for another split to win is looked for: links, memory, the
    batch. `args`, `kwargs`, `loss`, `rules` and `profile` are those that the plan was made with.
    """
    from shardfold.capture import capture

    watch(Stage("capture", 0, 1))
    _, pricing = pricing_of(plan.provenance.cost, profile, set())

    def captured(factor: float) -> tuple[Graph, Subdims]:
        part = example_for(plan, args, kwargs)
        batch = _scaled(part, factor)
        graph = capture(model, *batch, dtype=_dtype(plan), loss=loss)
        return graph, find_subdims(graph, rules_of(graph, {**pricing.rules, **(rules or {})}))

    graph, subdims = captured(1.0)
    check(plan, graph)
    cluster = from_plain(plan.provenance.cluster)
    case = case_of(plan, graph, subdims, cluster, pricing)
    mesh = mesh_of(plan, cluster)
    setting = Setting(plan, graph, subdims, cluster, mesh, case.limit_bytes, pricing)
    return reasons(
        plan,
        case,
        op,
        everything,
        lambda done, total: watch(Stage("explain", done, total)),
        Asker(setting, seconds) if seconds > 0 else None,
        captured,
    )


def _scaled(batch: Any, factor: float) -> Any:
    """The example batch with its leading dim scaled; what does not have that dim stays."""
    size = next((leaf.shape[0] for leaf in _tensors(batch) if len(leaf.shape)), None)
    if factor == 1.0 or size is None:
        return batch
    if size * factor != int(size * factor):
        raise PlanError(f"A batch of {size} cannot be scaled by {factor:g}.")

    def scaled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: scaled(inner) for key, inner in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(scaled(inner) for inner in value)
        if hasattr(value, "new_empty") and len(value.shape) and value.shape[0] == size:
            return value.new_empty((int(size * factor), *value.shape[1:]))
        return value

    return scaled(batch)


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for inner in value:
            yield from _tensors(inner)
    elif hasattr(value, "new_empty"):
        yield value


def what_if(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan,
    cluster: str | Cluster | None = None,
    dtype: str | None = None,
    optimizer: str | None = None,
    cost: str | None = None,
    profile: str | Path | Profile | None = None,
    memory_limit: float | None = None,
    loss: Callable[[Any], Any] | None = None,
    rules: Mapping[str, Maker] | None = None,
    watch: Watch = ignore,
) -> WhatIf:
    """The best plan if something changes, and what the splits of `plan` would cost there.

    What is not given stays as in `plan`, its pins included. `args` and `kwargs` may be a batch of
    another size. A plan by a profile needs it here, too. The old splits can be priced where a mesh
    of the same shape exists.
    """
    from shardfold.capture import capture

    old = from_plain(plan.provenance.cluster)
    target = parse(cluster) if isinstance(cluster, str) else cluster or old
    made = plan.provenance
    dtype = dtype or _dtype(plan)
    cost, pricing = pricing_of(cost or made.cost, profile, set())
    optimizer = optimizer or made.optimizer
    if memory_limit is None and not _is_default_limit(plan, old):
        memory_limit = plan.estimate.limit_bytes
    after = find_plan(
        model,
        args,
        kwargs,
        cluster=target,
        dtype=dtype,
        optimizer=optimizer,
        cost=cost,
        profile=profile,
        memory_limit=memory_limit,
        pins=None if plan.pinned is None else {p.pattern: p.split for p in plan.pinned.pins},
        loss=loss,
        rules=rules,
        watch=watch,
    )
    try:
        part = example_for(plan, args, kwargs)
    except InputError as error:  # a batch that the plan's micro-batches do not divide
        return WhatIf(plan, after, Kept(None, None, str(error)))
    graph = capture(model, *part, dtype=dtype, loss=loss)
    return WhatIf(plan, after, _kept(plan, graph, target, pricing, optimizer, rules))


def _kept(
    plan: Plan,
    graph: Graph,
    cluster: Cluster,
    pricing: Pricing,
    optimizer: str,
    rules: Mapping[str, Maker] | None,
) -> Kept:
    """What the plan's choice costs in the new setting, or why it is not possible there."""
    subdims = find_subdims(graph, rules_of(graph, {**pricing.rules, **(rules or {})}))
    try:
        mesh = mesh_from_text("x".join(str(axis.size) for axis in plan.mesh) or "1", cluster)
        model = pricing.model(cluster, mesh)
        assembly = restated(plan, graph, subdims, mesh, model, optimizer_named(optimizer))
    except (ClusterError, PlanError) as error:
        return Kept(None, None, str(error))
    problem = assembly.tabulated.problem
    peak = problem.total_bytes(assembly.choice)
    if pricing.overlaps:
        peak = simulate(Scheduler(graph, subdims, cluster).alone(assembly)).peak_bytes
    return Kept(problem.total(assembly.choice), peak)


def _dtype(plan: Plan) -> str | None:
    return None if plan.provenance.dtype == AS_IN_MODEL else plan.provenance.dtype


def _is_default_limit(plan: Plan, cluster: Cluster) -> bool:
    return isclose(plan.estimate.limit_bytes, (1 - RESERVE) * cluster.device.memory_bytes)
