from __future__ import annotations

import numpy as np
import pytest

from shardfold.errors import InputError
from shardfold.search import Problem
from shardfold.search.elimination import ORDERS, cost_of, eliminate, factors_of, forecast


def graph(sizes: list[int], edges: list[tuple[int, int]]) -> Problem:
    costs = tuple(np.zeros(k) for k in sizes)
    return Problem(costs, tuple(edges), tuple(np.zeros((sizes[u], sizes[v])) for u, v in edges))


STAR = graph([5, 2, 2, 2, 2], [(0, v) for v in range(1, 5)])
GRID = graph(
    [3] * 9,
    [(v, v + 1) for v in range(9) if v % 3 < 2] + [(v, v + 3) for v in range(6)],
)


@pytest.mark.parametrize("name", [name for name in ORDERS if name != "breadth-first"])
def test_orders_leave_the_middle_of_a_star_for_last(name: str) -> None:
    plan = forecast(factors_of(STAR), name)
    assert sorted(plan.order) == list(range(5))
    assert plan.order.index(0) >= 2
    assert plan.largest == pytest.approx(5)


def test_breadth_first_pays_for_the_whole_star() -> None:
    assert forecast(factors_of(STAR), "breadth-first").largest == pytest.approx(16)


def test_generate_seq_takes_the_fewest_neighbours_first() -> None:
    order = forecast(factors_of(GRID), "generate-seq").order
    assert order[0] == 0
    assert order.index(4) > 4


@pytest.mark.parametrize("name", ORDERS)
def test_the_forecast_is_what_elimination_then_builds(name: str) -> None:
    factors = factors_of(GRID)
    plan = forecast(factors, name)
    seen: list[int] = []
    eliminate(factors, plan.order, lambda progress: seen.append(progress.table_entries))
    assert max(seen) == pytest.approx(plan.largest)
    assert sum(seen) == pytest.approx(plan.stored)


def test_auto_predicts_no_more_work_than_any_other() -> None:
    random = np.random.default_rng(0)
    sizes = random.integers(2, 60, 14).tolist()
    edges = [(u, v) for u in range(14) for v in range(u + 1, 14) if random.random() < 0.3]
    factors = factors_of(graph(sizes, edges))
    auto = forecast(factors, "auto").work
    assert all(auto <= forecast(factors, name).work for name in ORDERS)


def test_work_counts_joint_entries() -> None:
    chain = graph([2, 3, 4], [(0, 1), (1, 2)])
    assert cost_of(factors_of(chain), (0, 1, 2), "").work == pytest.approx(2 * 3 + 3 * 4 + 4)


def test_an_unknown_order_suggests_one() -> None:
    with pytest.raises(InputError, match="Did you mean min-fill"):
        forecast(factors_of(STAR), "minfill")
