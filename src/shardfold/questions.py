"""Questions about a plan: why is an operator split so, and what if something else changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shardfold import collector
from shardfold.api import Stage, Watch, ignore
from shardfold.cluster.files import from_plain
from shardfold.costs import pricing_named
from shardfold.plans import Plan, check
from shardfold.plans.explain import case_of
from shardfold.plans.explain import explain as reasons
from shardfold.plans.explanation import Explanation
from shardfold.spaces import Maker, atomise, rules_of

if TYPE_CHECKING:
    from torch import nn

AS_IN_MODEL = "as in the model"  # what a plan says whose dtype was not given


@collector.paused()
def explain(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan,
    op: str | None = None,
    everything: bool = False,
    loss: Callable[[Any], Any] | None = None,
    rules: Mapping[str, Maker] | None = None,
    watch: Watch = ignore,
) -> Explanation:
    """Why `plan` splits operators of `model` as it does: what any other split would cost.

    `op` names modules by their paths, with `*` and `?`, or an operator by its name; without it
    the slowest operators are explained. Every other split of an operator is priced exactly, with
    everything else chosen anew around it, on the plan's mesh and within its memory limit.
    `everything` explains each operator that matches, small ones and repeated ones, too. `args`,
    `kwargs`, `loss` and `rules` are those that the plan was made with.
    """
    from shardfold.capture import capture

    watch(Stage("capture", 0, 1))
    dtype = None if plan.provenance.dtype == AS_IN_MODEL else plan.provenance.dtype
    graph = capture(model, args, kwargs, dtype=dtype, loss=loss)
    check(plan, graph)
    pricing = pricing_named(plan.provenance.cost)
    atoms = atomise(graph, rules_of(graph, {**pricing.rules, **(rules or {})}))
    case = case_of(plan, graph, atoms, from_plain(plan.provenance.cluster))
    return reasons(
        plan, case, op, everything, lambda done, total: watch(Stage("explain", done, total))
    )
