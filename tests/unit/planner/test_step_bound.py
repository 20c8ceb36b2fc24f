"""The bound on the simulated step: of what runs again, of master weights, and in a plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import shardfold as sf
from draws import covering
from shardfold import zoo
from shardfold.capture import capture_short
from shardfold.cluster import parse
from shardfold.costs import optimizer_named, pricing_named
from shardfold.costs.activations import KEEP_ALL
from shardfold.errors import InputError
from shardfold.graph import Graph
from shardfold.graph.precision import precision_named
from shardfold.planner.case import Candidate, Cases, ResolvedRequest, Source, simulate
from shardfold.planner.select import Ranking
from shardfold.planner.step_bound import CaseBound
from shardfold.report.summary_text import sentences


@pytest.fixture(scope="module")
def llama() -> Graph:
    """Eight layers, of which a few are traced."""
    return capture_short(*zoo.build("llama3-8b-tiny", layers=8, batch=64), dtype="bf16-mixed")


@pytest.mark.parametrize(
    ("precision", "passes"), [("bf16", 1), ("bf16-mixed", 1), ("bf16-mixed", 3)]
)
def test_what_runs_again_or_is_cast_is_never_below_the_bound(
    llama: Graph, precision: str, passes: int
) -> None:
    graph = replace(llama, precision=precision_named(precision))
    cluster = parse("2x4xh100")
    request = ResolvedRequest(
        cluster,
        cluster.meshes()[:1],
        pricing_named("kernels"),
        optimizer_named("adamw"),
        micro_batches=passes,
    )
    cases = Cases(graph, request)
    keeping, again = (cases.on(0, regions, request) for regions in (KEEP_ALL, cases.blocks))
    assert again.recomputed
    sizes = keeping.unrolled.problem.sizes.tolist()
    chosen = [keeping.solve().choice, again.solve().choice, *(covering(sizes, k) for k in range(3))]
    found = [
        simulate(Candidate(case, case.solve()).choosing(choice, Source.METHOD, ""))
        for choice in chosen
        for case in (keeping, again)
    ]
    limit = float(np.median([each.peak_bytes for each in found]))
    for case in (keeping, again):
        bound = CaseBound.of(Candidate(case, case.solve()), limit)
        bound.meet(np.array(chosen[0]))
        list(bound.propose(Ranking(limit), np.inf))
        for each in found:
            choice = np.array(each.choice)
            if each.case.recomputed or not case.recomputed:
                assert bound.least(choice) <= each.seconds
            if not each.case.recomputed and not case.recomputed:
                assert bound.held_bytes(choice).max() <= each.peak_bytes
            if each.peak_bytes <= limit and each.case.recomputed:
                assert bound.seconds <= each.seconds


def test_a_plan_says_how_much_faster_any_other_can_be() -> None:
    plan = sf.plan(*zoo.build("alexnet", batch=256), cluster="2x4xa100", mesh="2x4")
    bound, step = plan.estimate.step_lower_bound_seconds, plan.estimate.step_seconds
    assert bound is not None
    assert 0.5 * step < bound <= step
    said = [each.text for each in sentences(plan)]
    assert any(
        text.startswith("No plan on this mesh has a step that is more than ") for text in said
    )
    paper = sf.plan(*zoo.build("alexnet", batch=256), cluster="2x4xa100", cost="paper")
    assert paper.estimate.step_lower_bound_seconds is None
    assert not any(each.text.startswith("No plan") for each in sentences(paper))


def test_of_steps_that_are_nearly_equal_the_simpler_or_smaller_is_preferred() -> None:
    built = zoo.build("bert-large", layers=4, batch=64)
    plans = {
        prefer: sf.plan(*built, cluster="8xa100", dtype="bf16", prefer=prefer)
        for prefer in ("speed", "simple", "memory")
    }
    speed, simple, memory = (plans[name].estimate for name in ("speed", "simple", "memory"))
    for other in (simple, memory):
        assert speed.step_seconds <= other.step_seconds <= 1.005 * speed.step_seconds
    assert memory.peak_bytes <= min(simple.peak_bytes, speed.peak_bytes)
    with pytest.raises(InputError, match="Unknown prefer 'fast'"):
        sf.plan(*built, cluster="8xa100", prefer="fast")
