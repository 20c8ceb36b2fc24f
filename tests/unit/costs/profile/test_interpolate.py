import numpy as np
import pytest

from shardfold.costs.profile.interpolate import Interpolated, fitted, least_seconds
from shardfold.costs.profile.profile import Rates, Table

RATES = Rates({"float32": 1e11}, 1e10)
GRID = ((64.0, 256.0, 1024.0), (64.0, 512.0), (32.0, 256.0))


def table(efficiency: float = 2.0) -> Table:
    sizes = np.meshgrid(*map(np.array, GRID), indexing="ij")
    seconds = least_seconds("matmul.nt", "float32", sizes, RATES) * efficiency
    return Table("matmul.nt", "float32", GRID, tuple(map(float, seconds.ravel())))


def test_the_grid_itself_is_returned() -> None:
    found = Interpolated(table(), RATES)
    given = np.array(table().seconds).reshape(3, 2, 2)
    for i, m in enumerate(GRID[0]):
        assert found.seconds(([m], [512.0], [256.0]))[0] == pytest.approx(given[i, 1, 1])


def test_a_constant_factor_holds_between_and_beyond() -> None:
    found = Interpolated(table(3.0), RATES)
    for sizes in ((100.0, 100.0, 100.0), (5000.0, 700.0, 300.0)):
        expected = 3.0 * least_seconds("matmul.nt", "float32", sizes, RATES)
        assert found.seconds([[s] for s in sizes])[0] == pytest.approx(float(expected))


def test_nothing_is_faster_than_the_fastest_kernel_measured() -> None:
    found = Interpolated(table(), RATES)
    assert found.seconds(([1.0], [1.0], [1.0]))[0] == pytest.approx(min(table().seconds))


def test_far_beyond_the_grid_is_said() -> None:
    found = Interpolated(table(), RATES)
    assert not found.beyond(([2000.0], [512.0], [256.0]))
    assert found.beyond(([3000.0], [512.0], [256.0]))


def test_what_was_not_measured_takes_the_nearest_factor() -> None:
    seconds = list(table(4.0).seconds)
    seconds[-1] = None
    gaps = Table("matmul.nt", "float32", GRID, tuple(seconds))
    whole = least_seconds("matmul.nt", "float32", (1024.0, 512.0, 256.0), RATES)
    assert Interpolated(gaps, RATES).seconds(([1024.0], [512.0], [256.0]))[0] == pytest.approx(
        4.0 * float(whole)
    )


def test_the_fit_is_the_error_at_the_probes() -> None:
    least = float(least_seconds("matmul.nt", "float32", (128.0, 128.0, 128.0), RATES))
    probes = [((128, 128, 128), 2.0 * least), ((128, 128, 128), 2.5 * least)]
    fit = fitted(table(2.0), probes, RATES).fit
    assert fit is not None
    assert (fit.probes, fit.median, fit.worst) == (2, 0.1, 0.2)
