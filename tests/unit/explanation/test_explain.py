"""Explanations: every alternative against min-marginals and against the plan with that pin."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import msgspec
import pytest

import shardfold as sf
from shardfold import zoo
from shardfold.capture import capture
from shardfold.cluster import parse
from shardfold.costs import OPTIMIZERS, pricing_named
from shardfold.errors import PlanError
from shardfold.explanation.explain import Case, case_of, explain
from shardfold.explanation.explanation import Explanation
from shardfold.graph import Graph
from shardfold.operators import rules_of
from shardfold.planner.case import Cases, ResolvedRequest
from shardfold.planner.mesh_search import search_meshes
from shardfold.search.elimination import factors_of, forecast
from shardfold.search.pareto import marginals
from shardfold.sharding import Subdims, find_subdims
from shardfold.sharding.names import in_words
from shardfold.strategies.pins import Pin

CLUSTER = "2x2x1080ti"
COST = "paper"  # knows no overlap: the plan is the best sum, which is what explanations are about
MODELS = ("gpt2-tiny", "alexnet-tiny", "rnnlm-tiny")


@dataclass(frozen=True)
class Told:
    graph: Graph
    subdims: Subdims
    plan: sf.Plan
    case: Case
    found: Explanation


@cache
def told(name: str) -> Told:
    module, args, kwargs = zoo.build(name, device="meta")
    plan = sf.plan(module, args, kwargs, cluster=CLUSTER, cost=COST)
    graph = capture(module, args, kwargs)
    subdims = find_subdims(graph, rules_of(graph, pricing_named(COST).rules))
    case, setting = case_of(plan, graph, subdims, parse(CLUSTER), pricing_named(COST))
    found = explain(case, setting, "*", True, lambda done, total: None)
    return Told(graph, subdims, plan, case, found)


@pytest.mark.parametrize("name", MODELS)
def test_every_operator_is_explained_and_the_step_is_the_plans(name: str) -> None:
    it = told(name)
    assert {r.operator.name for r in it.found.reasons} == {op.name for op in it.graph.ops}
    assert it.found.additive_seconds == pytest.approx(it.plan.estimate.additive_seconds, rel=1e-12)
    assert it.found.optimal
    assert not it.found.limit_binds


@pytest.mark.parametrize("name", MODELS)
def test_every_alternative_costs_its_min_marginal(name: str) -> None:
    it = told(name)
    factors = factors_of(it.case.problem)
    best = marginals(factors, forecast(factors, "auto").order).best
    compared = 0
    for reason in it.found.reasons:
        index = next(i for i, op in enumerate(it.graph.ops) if op.name == reason.operator.name)
        v = it.case.vertex_of[index]
        offered = it.case.decoded.offered(v)
        assert len(offered) == len(reason.alternatives) + 1
        for alternative in reason.alternatives:
            _, rows = offered[frozenset(alternative.split.items())]
            assert alternative.additive_seconds == pytest.approx(best[v][rows].min(), rel=1e-9)
            compared += 1
    assert compared > 2 * len(it.found.reasons)


@pytest.mark.parametrize("name", MODELS)
def test_the_runner_up_costs_what_a_plan_with_that_pin_costs(name: str) -> None:
    it = told(name)
    target = parse(CLUSTER)
    pricing = pricing_named(COST)
    checked = 0
    for reason in it.found.reasons:
        second = reason.runner_up
        if second is None:
            continue
        pin = Pin.parse(f":{reason.operator.name}", in_words(second.split))
        mesh = [it.case.decoded.tables.mesh]
        request = ResolvedRequest(target, mesh, pricing, OPTIMIZERS["adamw"], pins=[pin])
        found = search_meshes(Cases(it.graph, request), request, lambda done, total: None)
        assert second.additive_seconds == pytest.approx(found.winner.solution.cost, rel=1e-9)
        checked += 1
    assert checked >= len(it.found.reasons) / 2


@pytest.mark.parametrize("name", MODELS)
def test_the_terms_add_up_to_the_difference(name: str) -> None:
    for reason in told(name).found.reasons:
        if reason.runner_up is None:
            assert reason.terms == ()
            continue
        assert reason.runner_up.additive_seconds is not None
        difference = reason.runner_up.additive_seconds - reason.additive_seconds
        total = sum(term.seconds for term in reason.terms)
        assert total == pytest.approx(difference, abs=1e-8 * reason.additive_seconds)
        ordered = [a.additive_seconds or float("inf") for a in reason.alternatives]
        assert ordered == sorted(ordered)
        assert ordered[0] >= reason.additive_seconds * (1 - 1e-9)


def test_the_text_fits_80_columns_and_names_the_runner_up() -> None:
    it = told("alexnet-tiny")
    text = str(it.found)
    assert max(map(len, text.splitlines())) <= 80
    reason = next(r for r in it.found.reasons if r.operator.module == "fc6")
    assert reason.runner_up is not None
    assert f"With {in_words(reason.runner_up.split)} the cost changes by" in text


def test_what_becomes_of_activations_is_said() -> None:
    module, args, kwargs = zoo.build("llama3-8b-tiny", layers=4)
    planner = sf.Planner(module, args, kwargs)
    plan = planner.plan(cluster="2xa100", recompute="products")
    again = {plan.operators[i].name for a, b in plan.recompute for i in range(a, b)}
    found = planner.explain(plan, op="*layers.1.mlp*")
    told = {r.operator.kind: r for r in found.reasons}
    assert told["aten.silu"].operator.name in again
    assert told["aten.silu"].memory.startswith("recomputed: it runs again in backward")
    gate = next(r for r in found.reasons if r.operator.module.endswith("gate_proj"))
    assert ("recomputed" in gate.memory) == (gate.operator.name in again)
    assert "instead of keeping" in str(found)


def test_a_binding_limit_holds_for_the_alternatives() -> None:
    module, args, kwargs = zoo.build("rnnlm-tiny", device="meta")
    asked = {"cluster": CLUSTER, "mesh": "2x2", "cost": COST}
    free = sf.plan(module, args, kwargs, **asked)
    fixed = parse(CLUSTER).device.workspace_bytes
    limit = fixed + 0.8 * (free.estimate.peak_bytes - fixed)
    plan = sf.plan(module, args, kwargs, **asked, memory_limit=limit)
    found = sf.explain(module, args, kwargs, plan=plan, op="projection")
    assert found.limit_binds
    assert "the limit binds: faster plans do not fit" in " ".join(str(found).split())
    (reason,) = found.reasons
    steps = [a for a in reason.alternatives if a.additive_seconds is not None]
    assert steps
    assert all((a.peak_bytes or 0.0) <= limit for a in steps)
    assert steps[0].additive_seconds >= plan.estimate.additive_seconds * (1 - 1e-9)
    (full,) = sf.explain(
        *(module, args, kwargs), plan=plan, op="projection", everything=True
    ).reasons
    exact = {frozenset(a.split.items()): a for a in full.alternatives}
    assert len(exact) == len(reason.alternatives)
    assert reason.runner_up is not None
    assert reason.runner_up.additive_seconds == pytest.approx(full.alternatives[0].additive_seconds)
    for alternative in reason.alternatives:
        known = exact[frozenset(alternative.split.items())].additive_seconds or float("inf")
        assert (alternative.additive_lower_bound_seconds or 0.0) <= known * (1 + 1e-9)
    pinned = sf.plan(
        *(module, args, kwargs),
        **asked,
        memory_limit=limit,
        pins={"projection": in_words(reason.runner_up.split)},
    )
    assert pinned.estimate.additive_seconds == pytest.approx(
        reason.runner_up.additive_seconds, rel=1e-9
    )


def test_a_pinned_operator_is_said_to_be_and_its_pin_shows_its_price() -> None:
    module, args, kwargs = zoo.build("rnnlm-tiny", device="meta")
    plan = sf.plan(module, args, kwargs, cluster=CLUSTER, pins={"projection": "hidden/2"})
    found = sf.explain(module, args, kwargs, plan=plan, op="projection")
    (reason,) = found.reasons
    assert reason.is_pinned
    assert "split hidden/2, pinned" in str(found)
    assert plan.pinned is not None
    assert reason.runner_up is not None
    assert reason.runner_up.additive_seconds == pytest.approx(
        plan.pinned.free_additive_seconds, rel=1e-9
    )


def test_a_plan_for_another_model_is_refused() -> None:
    module, args, kwargs = zoo.build("rnnlm-tiny", device="meta")
    with pytest.raises(PlanError, match="another model"):
        sf.explain(module, args, kwargs, plan=told("alexnet-tiny").plan)


def edited(plan: sf.Plan, module: str, config: tuple[str, ...]) -> sf.Plan:
    operators = tuple(
        msgspec.structs.replace(entry, config=config) if entry.module == module else entry
        for entry in plan.operators
    )
    return msgspec.structs.replace(plan, operators=operators)


def test_a_plan_edited_by_hand_is_priced_as_it_stands() -> None:
    module, args, kwargs = zoo.build("rnnlm-tiny", device="meta")
    plan = sf.plan(module, args, kwargs, cluster=CLUSTER, cost="roofline")
    other = edited(plan, "projection", ("i0", "-"))
    found = sf.explain(module, args, kwargs, plan=other, op="projection")
    (reason,) = found.reasons
    assert reason.operator.split == {"batch": 2}
    assert found.additive_seconds > plan.estimate.additive_seconds
    assert found.step_seconds > plan.estimate.step_seconds
    assert not found.optimal
    assert reason.runner_up is not None
    assert reason.runner_up.additive_seconds == pytest.approx(
        plan.estimate.additive_seconds, rel=1e-9
    )
    assert sum(t.seconds for t in reason.terms) < 0
    with pytest.raises(PlanError, match=r"Operator linear .* has no factor 'nonsense'\. Known"):
        sf.explain(*(module, args, kwargs), plan=edited(plan, "projection", ("nonsense", "-")))
