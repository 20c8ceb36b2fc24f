"""The storages of a parameter: as used, sharded, and sharded with a second gather."""

from __future__ import annotations

import numpy as np

from shardfold.cluster import Mesh
from shardfold.cluster.mesh import Axis
from shardfold.costs import OPTIMIZERS
from shardfold.costs.parameters import Storage, storages, summed_axes, update_steps
from shardfold.graph import TensorType
from shardfold.sharding.layouts import PENDING, REPLICATED, SHARED

W = REPLICATED


def mesh(*sizes: int) -> Mesh:
    return Mesh(tuple(Axis(f"x{i}", size, 0) for i, size in enumerate(sizes)))


def choices(storage: Storage) -> set[tuple[tuple[int, ...], bool]]:
    rows = [tuple(row) for row in storage.layouts.tolist()]
    found = list(zip(rows, storage.regathers.tolist(), strict=True))
    assert len(found) == len(set(found))
    return set(found)


def stored(
    needed: list[list[int]], subdims: tuple[int, ...], *sizes: int, dims: tuple[int, ...] = ()
) -> Storage:
    dims = dims or tuple(range(len(subdims)))
    return storages([np.array(needed, np.int8)], subdims, dims, mesh(*sizes))


def test_a_shared_weight_is_kept_whole_or_sharded() -> None:
    assert choices(stored([[SHARED]], (8, 4), 2)) == {((W,), False), ((0,), False), ((0,), True)}


def test_a_parameter_is_never_kept_as_parts_of_a_sum() -> None:
    assert choices(stored([[PENDING]], (8, 4), 2)) == choices(stored([[SHARED]], (8, 4), 2))


def test_a_split_weight_with_nothing_free_is_kept_as_used() -> None:
    assert choices(stored([[1]], (8, 4), 2)) == {((1,), False)}


def test_what_one_reader_splits_another_may_gather_twice() -> None:
    found = choices(stored([[SHARED], [0]], (8, 4), 2))
    assert found == {((W,), False), ((0,), False), ((0,), True)}


def test_every_set_of_free_axes_is_offered() -> None:
    found = {row for row, _ in choices(stored([[SHARED, 1]], (8, 4), 2, 2))}
    assert found == {(W, 1), (0, 1)}
    found = {row for row, _ in choices(stored([[SHARED, SHARED]], (8, 2), 2, 2))}
    assert found == {(W, W), (0, W), (W, 0), (0, 0)}


def test_gradients_of_several_readers_may_be_summed_up_first() -> None:
    by_batch, by_rows = np.array([[SHARED, SHARED]], np.int8), np.array([[SHARED, 0]], np.int8)
    assert summed_axes([by_batch]) == ()
    assert summed_axes([by_batch, by_rows]) == (0,)
    assert summed_axes([by_batch, by_batch, by_rows]) == (0, 1)
    found = storages([by_batch, by_rows], (8, 4), (0, 1), mesh(2, 2), (0,))
    plain = storages([by_batch, by_rows], (8, 4), (0, 1), mesh(2, 2))
    assert found.has_sums
    assert not plain.has_sums
    more = choices(found) - choices(plain)
    assert choices(plain) <= choices(found)
    assert {row for row, _ in more} == {(SHARED, W), (SHARED, 0)}


def test_a_split_outside_one_in_use_would_need_two_gathers() -> None:
    """Axis 1 cuts atom 0 already; axis 0 must not cut it again from outside."""
    found = {row for row, _ in choices(stored([[SHARED, 0]], (8,), 2, 2))}
    assert found == {(W, 0)}


def test_inner_pieces_of_a_dim_are_split_over_one_axis_only() -> None:
    """A packed bias of 3 x 8 heads x 16: DTensor can say one strided split of a dim."""
    found = {row for row, _ in choices(stored([[1, 1]], (3, 8, 16), 2, 2, dims=(0, 0, 0)))}
    assert found == {(1, W)}
    found = {row for row, _ in choices(stored([[SHARED, 1]], (3, 8, 16), 2, 2, dims=(0, 0, 0)))}
    assert found == {(W, 1)}


def test_another_dim_is_sharded_where_one_is_split_strided() -> None:
    found = {row for row, _ in choices(stored([[1, SHARED]], (3, 8, 4), 2, 2, dims=(0, 0, 1)))}
    assert found == {(1, W), (1, 2)}


def test_leading_pieces_are_sharded_where_inner_ones_would_leave_an_axis_out() -> None:
    """8 heads x 16: the largest piece is strided, and could be split over one axis only."""
    found = {row for row, _ in choices(stored([[SHARED] * 2], (8, 16), 2, 2, dims=(0, 0)))}
    assert found == {(W, W), (1, W), (W, 1), (0, 1)}


def test_uneven_inner_pieces_are_stored_whole() -> None:
    found = {row for row, _ in choices(stored([[0]], (5, 16), 2, dims=(0, 0)))}
    assert found == {(W,), (1,)}


def test_a_size_that_cannot_be_split_stays_whole() -> None:
    assert choices(stored([[SHARED]], (3,), 2)) == {((W,), False)}


def test_an_update_touches_the_stored_part_only() -> None:
    storage = stored([[SHARED]], (8, 4), 2)
    (step,) = update_steps(
        storage, (8, 4), TensorType((8, 4), "float32"), OPTIMIZERS["adamw"], mesh(2)
    ).steps
    items = [16 if row[0] >= 0 else 32 for row in storage.layouts.tolist()]
    assert step.bytes.tolist() == [n * 4 * 7 for n in items]
    assert step.phase == "update"
