"""Data parallel and fully sharded are what their names say, collective by collective."""

from __future__ import annotations

import numpy as np
import pytest

from shardfold.graph import Graph
from shardfold.plans.entries import operator_entries, parameter_entries
from shardfold.search import solve
from shardfold.simulate.decoded import DecodedChoice
from shardfold.strategies.baselines import batch_factors, data_parallel, fully_sharded
from virtual.choosing import Desk, collectives
from virtual.sketch import Sketch

B, M, N = 16, 64, 128


def mlp(batch: int = B) -> Graph:
    sketch = Sketch()
    x = sketch.linear(sketch.input(batch, M), sketch.parameter(M, M))
    h = sketch.relu(sketch.linear(x, sketch.parameter(N, M)))
    y = sketch.linear(h, sketch.parameter(M, N), sketch.parameter(M))
    return sketch.graph(sketch.cross_entropy(y, sketch.input(batch, dtype="int64")))


def baselines(desk: Desk) -> tuple[DecodedChoice, DecodedChoice]:
    batch = batch_factors(desk.graph, desk.subdims)
    return tuple(desk.decoded(c(desk.tables, batch)) for c in (data_parallel, fully_sharded))  # type: ignore[return-value]


PARAMETERS = sorted([M * M * 4, M * N * 4, M * N * 4, M * 4])


def test_data_parallel_is_one_all_reduce_a_gradient() -> None:
    desk = Desk.of(mlp(), "4xa100", "2x2", "adamw")
    plain, _ = baselines(desk)
    large = [c for c in collectives(plain) if c[3] > 4]
    assert large == [("backward", "all_reduce", (0, 1), size) for size in PARAMETERS]
    assert all(set(e.layout) == {"replicated"} for e in parameter_entries(plain))


def test_fully_sharded_gathers_twice_and_scatters_once() -> None:
    desk = Desk.of(mlp(), "4xa100", "4", "adamw")
    _, sharded = baselines(desk)
    large = [c for c in collectives(sharded) if c[3] > 4]
    # Backward needs no bias again, nor the weight of the layer that reads the batch.
    matrices = [M * N * 4, M * N * 4]
    assert large == [
        *(("backward", "all_gather", (0,), size) for size in matrices),
        *(("backward", "reduce_scatter", (0,), size) for size in PARAMETERS),
        *(("forward", "all_gather", (0,), size) for size in PARAMETERS),
    ]
    assert all(e.regather for e in parameter_entries(sharded))


@pytest.mark.parametrize("mesh", ["8", "2x4", "2x2x2"])
def test_every_operator_is_split_by_batch_over_all_devices(mesh: str) -> None:
    desk = Desk.of(mlp(), "8xa100", mesh, "adamw")
    for decoded in baselines(desk):
        assert {tuple(entry.split.items()) for entry in operator_entries(decoded)} == {
            (("batch", 8),)
        }


def test_fully_sharded_holds_an_eighth_of_the_parameters() -> None:
    desk = Desk.of(mlp(), "8xa100", "2x2x2", "adamw")
    plain, sharded = (desk.tables.problem.total_bytes(a.choice) for a in baselines(desk))
    state = 4 * sum(PARAMETERS)
    assert plain - sharded == pytest.approx(state * 7 / 8)


def test_a_batch_smaller_than_the_devices_uses_fewer_axes() -> None:
    desk = Desk.of(mlp(batch=4), "8xa100", "2x2x2", "adamw")
    for decoded in baselines(desk):
        splits = {entry.split["batch"] for entry in operator_entries(decoded)}
        assert splits == {4}


def test_a_batch_of_one_is_not_split() -> None:
    desk = Desk.of(mlp(batch=1), "8xa100", "2x4", "adamw")
    plain, _ = baselines(desk)
    assert all(entry.split == {} for entry in operator_entries(plain))


@pytest.mark.parametrize("mesh", ["8", "2x4", "2x2x2"])
def test_no_baseline_beats_the_plan(mesh: str) -> None:
    desk = Desk.of(mlp(), "8xa100", mesh, "adamw")
    best = solve(desk.tables.problem).cost
    for decoded in baselines(desk):
        assert best <= desk.tables.problem.total(decoded.choice) * (1 + 1e-9)
        assert np.isfinite(desk.tables.problem.total(decoded.choice))
