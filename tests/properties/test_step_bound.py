"""No choice has a shorter simulated step than is proven: brute force on random small problems."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from draws import covering, draws
from shardfold.cluster import mesh_from_text, parse
from shardfold.costs import optimizer_named, pricing_named
from shardfold.costs.activations import KEEP_ALL
from shardfold.costs.demands import Bounds
from shardfold.graph import Graph
from shardfold.planner.case import Candidate, Case, Cases, ResolvedRequest, Source, simulate
from shardfold.planner.select import Ranking
from shardfold.planner.step_bound import CaseBound
from virtual.drawing import graphs
from virtual.sketch import Sketch

PLACES = [("2xa100", "2"), ("4xa100", "2x2"), ("2x2xh100", "2x2"), ("2x2x1080ti", "2x2")]
SIZES = (64, 512, 4096)  # so that work and links take about as long as one another
MOST = 200  # choices that are all simulated


def case_of(graph: Graph, place: tuple[str, str], cost: str, passes: int) -> Case:
    cluster = parse(place[0])
    mesh, pricing = mesh_from_text(place[1], cluster), pricing_named(cost)
    request = ResolvedRequest(
        cluster, (mesh,), pricing, optimizer_named("adamw"), micro_batches=passes
    )
    return Cases(graph, request).on(0, KEEP_ALL, request)


def raised(case: Case, limit: float = math.inf, is_wrong: bool = False) -> CaseBound:
    """The bound of a case, with all that the proof meets simulated on the way."""
    ranking = Ranking(limit)
    found = Candidate(case, case.solve())
    bound = CaseBound.of(found, limit)
    bound.meet(np.array(found.choice))
    ranking.candidates.append(simulate(found))
    for propose in (lambda: bound.propose(ranking, math.inf), lambda: bound.mix(ranking)):
        for candidate in propose():
            ranking.candidates.append(simulate(candidate))
    for near in ranking.fitting(ranking.candidates):  # the likeliest to be below it
        assert bound.seconds <= near.seconds or is_wrong
    return bound


def simulated(case: Case, choice: Sequence[int]) -> Candidate:
    return simulate(Candidate(case, case.solve()).choosing(choice, Source.METHOD, ""))


def is_small(case: Case) -> bool:
    return math.prod(case.unrolled.problem.sizes.tolist()) <= MOST


problems = st.tuples(
    graphs(max_ops=3, sizes=SIZES),
    st.sampled_from(PLACES),
    st.sampled_from(["roofline", "kernels"]),
    st.sampled_from([1, 1, 2, 3]),
)


def all_simulated(case: Case) -> list[Candidate]:
    sizes = case.unrolled.problem.sizes.tolist()
    return [simulated(case, choice) for choice in product(*map(range, sizes))]


@given(problems, st.floats(0, 1))
@draws(20)
def test_no_choice_has_a_shorter_step_than_the_bound(drawn, share: float) -> None:
    """With no limit, and with one that some choices meet."""
    case = case_of(*drawn)
    assume(is_small(case))
    found = all_simulated(case)
    bound = raised(case)
    for each in found:
        choice = np.array(each.choice)
        assert bound.least(choice) <= each.seconds
        assert bound.seconds <= each.seconds
        assert bound.held_bytes(choice).max() <= each.peak_bytes * (1 + 1e-9)
    limit = float(np.quantile([each.peak_bytes for each in found], share))
    fitting = [each.seconds for each in found if each.peak_bytes <= limit]
    assert raised(case, limit).seconds <= min(fitting)


@given(
    st.tuples(
        graphs(max_ops=8, sizes=SIZES),
        st.sampled_from([*PLACES, ("2x4xh100", "2x2x2")]),
        st.sampled_from(["roofline", "kernels"]),
        st.sampled_from([1, 1, 2, 3]),
    )
)
@draws(20)
def test_no_sum_exceeds_the_step_of_any_choice(drawn) -> None:
    case = case_of(*drawn)
    bound = raised(case)
    sizes = case.unrolled.problem.sizes.tolist()
    for number in range(4):
        found = simulated(case, covering(sizes, number))
        assert bound.least(np.array(found.choice)) <= found.seconds
        assert bound.seconds <= found.seconds
        assert bound.held_bytes(np.array(found.choice)).max() <= found.peak_bytes * (1 + 1e-9)


def test_an_error_in_the_sums_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work and gathers one after the other, as if nothing overlapped."""
    of = Bounds._of

    def planted(self: Bounds, phase: str) -> Iterator[tuple[np.ndarray, bool]]:
        yield sum(row for row, _ in of(self, phase)), True

    monkeypatch.setattr(Bounds, "_of", planted)
    seen = []

    @given(problems)
    @settings(max_examples=8, derandomize=True, database=None)
    def look(drawn) -> None:
        case = case_of(*drawn)
        assume(is_small(case))
        bound = raised(case, is_wrong=True)
        seen.extend(bound.seconds > each.seconds for each in all_simulated(case))

    look()
    assert any(seen)


def test_a_parameter_that_is_only_sliced_gives_back_no_memory_that_it_never_took() -> None:
    sketch = Sketch()
    product_ = sketch.linear(sketch.input(64, 64), sketch.parameter(64, 64))
    case = case_of(sketch.graph(sketch.sum(sketch.relu(product_))), PLACES[0], "roofline", 1)
    bound = raised(case)
    for each in all_simulated(case):
        assert bound.held_bytes(np.array(each.choice)).max() <= each.peak_bytes
