import pytest

from shardfold.calibrate.grids import Grid, Plan, cpu_plan, cuda_plan
from shardfold.calibrate.kernels import CALLS, measure
from shardfold.calibrate.timers import CpuClock
from shardfold.costs.profile import FAMILIES

CLOCK = CpuClock(span_seconds=1e-4, rounds=1)


def look_away(name: str, done: int, total: int) -> None:
    pass


def test_a_grid_becomes_a_table_and_probes() -> None:
    grids = (
        Grid("matmul.nt", "float32", ((8, 16), (8,), (8,)), 3),
        Grid("vector", "float32", ((1 << 10, 1 << 12, 1 << 34),)),
    )
    plan = Plan(grids, 1.0, {"float32": 1e9}, 1e9, 1e6)
    (products, passes), probes = measure(plan, CLOCK, look_away)
    assert products.grid == ((8.0, 16.0), (8.0,), (8.0,))
    assert all(seconds is not None and seconds > 0 for seconds in products.seconds)
    assert passes.seconds[2] is None  # larger than may be measured
    assert len(probes["matmul.nt", "float32"]) == 3
    assert all(8 <= m <= 16 for (m, _, _), _ in probes["matmul.nt", "float32"])


@pytest.mark.parametrize("plan", [cuda_plan(), cpu_plan(), cuda_plan(True), cpu_plan(True)])
def test_every_grid_has_the_sizes_of_its_family(plan: Plan) -> None:
    for grid in plan.grids:
        assert grid.family in CALLS
        assert len(grid.axes) == len(FAMILIES[grid.family].sizes), grid.family
        assert all(list(axis) == sorted(set(axis)) for axis in grid.axes), grid.family
        for probe in grid.draw():
            pairs = zip(probe, grid.axes, strict=True)
            assert all(axis[0] <= size <= axis[-1] * 1.01 + 196 for size, axis in pairs)


def test_probes_are_the_same_every_time() -> None:
    grid = cuda_plan().grids[0]
    assert grid.draw() == grid.draw()


SMALL = {1: (4096,), 2: (32, 64), 3: (2, 8, 4), 4: (2, 8, 8, 4)}


@pytest.mark.parametrize("family", list(CALLS))
def test_every_family_can_be_called(family: str) -> None:
    import torch

    from shardfold.calibrate.kernels import Bench

    sizes = (16, 8, 8) if family.startswith("attention") else SMALL[len(FAMILIES[family].sizes)]
    CALLS[family](Bench("cpu", torch.float32), *sizes)()
