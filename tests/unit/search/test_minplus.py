from __future__ import annotations

import numpy as np
import pytest

from shardfold.search.minplus import Alike, minimise, product, undominated

random = np.random.default_rng(0)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 4, 5), (40, 70, 90), (90, 80, 60), (5, 900, 3)])
def test_product_is_the_minimum_of_the_joint_table(shape: tuple[int, int, int]) -> None:
    count, rows, columns = shape
    left, right = random.random((count, rows)), random.random((count, columns))
    joint = (left[:, :, None] + right[:, None, :]).min(axis=0)
    assert np.array_equal(product(left, right), joint)


@pytest.mark.parametrize("shape", [(9, 20, 11), (30, 30, 30), (20, 19, 60), (70, 60, 50)])
@pytest.mark.parametrize("order", ["CC", "FC", "CF", "FF"])
def test_sums_by_matrix_products_round_as_additions_do(
    shape: tuple[int, int, int], order: str
) -> None:
    count, rows, columns = shape
    scale = 10.0 ** random.integers(-20, 20, (count, 1))
    left = np.array((random.random((count, rows)) - 0.5) * scale, order=order[0])
    right = np.array((random.random((count, columns)) - 0.5) / scale, order=order[1])
    joint = (left[:, :, None] + right[:, None, :]).min(axis=0)
    assert np.array_equal(product(left, right), joint)


def test_product_broadcasts_leading_axes() -> None:
    left, right = random.random((3, 1, 4, 5)), random.random((2, 4, 6))
    joint = (left[..., :, :, None] + right[..., :, None, :]).min(axis=-3)
    assert np.array_equal(product(left, right), joint)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (50, 60, 70), (9, 9, 9, 200)])
def test_minimise_is_the_minimum_of_the_broadcast_sum(shape: tuple[int, ...]) -> None:
    whole = random.random(shape)
    row = random.random((1,) * (len(shape) - 1) + shape[-1:])
    column = random.random(shape[:1] + (1,) * (len(shape) - 1))
    tables = [whole, row] if len(shape) == 1 else [whole, row, column]
    expected = sum(tables).min(axis=-1)
    assert np.allclose(minimise(tables, shape), expected, rtol=1e-15)


def test_a_minimum_does_not_need_a_table_of_full_shape() -> None:
    tables = [random.random((1, 80, 40)), random.random((90, 1, 40))]
    assert np.array_equal(minimise(tables, (90, 80, 40)), (tables[0] + tables[1]).min(axis=-1))


def test_dropping_dominated_values_never_changes_the_product() -> None:
    left, right = random.integers(0, 3, (60, 8)) * 1.0, random.integers(0, 3, (60, 7)) * 1.0
    expected = (left[:, :, None] + right[:, None, :]).min(axis=0)
    for tries in (1, 2, 8):
        keep = undominated(left, right, tries)
        assert 0 < len(keep) < 60
        assert np.array_equal(product(left[keep], right[keep]), expected)


def test_equal_rows_are_found_and_nothing_else() -> None:
    table = random.random((4, 30))[[0, 1, 0, 2, 3, 1, 0, 2]]
    alike = Alike.find(table)
    assert alike is not None
    assert len(alike.first) == 4
    assert np.array_equal(table[alike.first][alike.kind], table)
    other = random.random((8, 3))
    least = alike.least(other)
    assert np.array_equal(least[alike.kind[0]], other[[0, 2, 6]].min(axis=0))
    assert Alike.find(random.random((20, 20))) is None


@pytest.mark.parametrize("shape", [(3, 4, 5), (40, 50, 30), (90, 60, 70)])
def test_a_product_in_single_precision_rounds_as_additions_do(shape: tuple[int, int, int]) -> None:
    random = np.random.default_rng(0)
    count, rows, columns = shape
    left = random.random((count, rows)).astype(np.float32)
    right = random.random((count, columns)).astype(np.float32)
    found = product(left, right)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, (left[:, :, None] + right[:, None]).min(axis=0))
