from __future__ import annotations

import numpy as np
import pytest

from shardfold.search import Problem, repeats, solve
from shardfold.search import repeats as blocks_module
from shardfold.search.exact import folded
from shardfold.search.table_store import Blocks

BLOCK = ((0, 1), (1, 2), (0, 2), (2, 3))


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_MIN_VERTICES", 20)


def chain(copies: int, seed: int, choices: int = 4) -> Problem:
    """Equal blocks in a row between two vertices that are unlike all others."""
    random = np.random.default_rng(seed)
    vectors = [random.random(choices) for _ in range(3)]
    tables = tuple(random.random((choices, choices)) for _ in BLOCK)
    edges = tuple((3 * t + u, 3 * t + v) for t in range(copies) for u, v in BLOCK)
    costs = [vectors[v % 3] for v in range(3 * copies + 1)]
    costs[0], costs[-1] = random.random(choices) * 5, random.random(choices) * 5
    return Problem(tuple(costs), edges, tables * copies)


def blocks_of(problem: Problem) -> Blocks:
    (blocks,) = [group for group in folded(problem).groups if isinstance(group, Blocks)]
    return blocks


def assert_exact(problem: Problem) -> None:
    solution = solve(problem)
    assert solution.is_optimal
    assert solution.cost == pytest.approx(problem.total(solution.choice), rel=1e-13)
    assert solution.cost == pytest.approx(solve(problem, order="min-fill").cost, rel=1e-13)


@pytest.mark.parametrize("copies", [*range(10, 30), 63, 64, 65, 100])
def test_any_number_of_blocks_costs_what_it_does_unfolded(copies: int) -> None:
    for seed in range(5):
        assert_exact(chain(copies, seed))


def test_blocks_with_many_ties_cost_what_they_do_unfolded() -> None:
    states = set()
    for seed in range(80):
        random = np.random.default_rng(seed)
        most = 2 + seed % 3
        own = random.integers(0, most, 4) * 1.0
        tables = tuple(random.integers(0, most, (4, 4)) * 1.0 for _ in range(2))
        copies = 20 + seed
        edges = tuple((v, v + 1) for v in range(2 * copies))
        ends = random.integers(0, 9, (2, 4)) * 1.0
        inner = ((own, own[::-1].copy()) * copies)[1:]
        problem = Problem((ends[0], *inner, ends[1]), edges, tables * copies)
        assert_exact(problem)
        if repeats.find_run(problem) is not None:
            states.add(len(blocks_of(problem).steady))
    assert {1, 2} <= states


def test_equal_pieces_are_decided_once() -> None:
    blocks = blocks_of(chain(200, seed=0))
    assert len(blocks.steady) == 1
    assert blocks.spare * blocks.piece > 100


def test_a_run_costs_no_more_tables_when_it_is_longer() -> None:
    few, many = folded(chain(100, seed=0)), folded(chain(400, seed=0))
    assert len(many.store.edges) <= len(few.store.edges) + 4


@pytest.mark.parametrize("count", [40, 41, 64, 99])
def test_joints_that_alternate_settle_two_blocks_apart(count: int) -> None:
    turn = np.array([[5.0, 0.0], [0.0, 5.0]])
    own = np.array([0.5, 0.25])
    costs = (np.array([0.0, 9.0]), *[own] * (count - 1))
    problem = Problem(costs, tuple((v, v + 1) for v in range(count - 1)), (turn,) * (count - 1))
    blocks = blocks_of(problem)
    assert (blocks.piece, blocks.steady.tolist()) == (2, [0, 1])
    assert blocks.spare > 10
    assert_exact(problem)
    assert solve(problem).choice == tuple(v % 2 for v in range(count))


@pytest.mark.parametrize("count", [40, 64, 99])
def test_joints_that_never_settle_are_squared_to_the_end(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks_module, "_SETTLES", 0)
    for seed in range(5):
        problem = chain(count, seed)
        assert not blocks_of(problem).steady.size
        assert_exact(problem)


def test_a_block_in_the_middle_that_reads_outside_ends_the_run() -> None:
    problem = chain(60, seed=1)
    random = np.random.default_rng(2)
    edges = (*problem.edges, (31, 151))
    other = Problem(problem.costs, edges, (*problem.edge_costs, random.random((4, 4)) * 9))
    assert repeats.find_run(other) is None
    assert_exact(other)


def test_choices_of_equal_cost_come_out_alike_every_time() -> None:
    table = np.zeros((3, 3))
    edges = tuple((v, v + 1) for v in range(199))
    problem = Problem((np.zeros(3),) * 200, edges, (table,) * 199)
    assert solve(problem).choice == (0,) * 200
