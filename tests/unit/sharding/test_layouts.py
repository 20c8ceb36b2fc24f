"""Layouts of values and of gradients, and what the fullest device holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draws import draws
from shardfold.sharding.layouts import (
    PENDING,
    REPLICATED,
    SHARED,
    distinct,
    forward_states,
    gradient_states,
    local_items,
)
from virtual.movement import devices, region


def test_values_and_gradients_mirror_each_other() -> None:
    row = np.array([[0, REPLICATED, SHARED, PENDING]], np.int8)
    assert forward_states(row).tolist() == [[0, REPLICATED, REPLICATED, PENDING]]
    assert gradient_states(row).tolist() == [[0, REPLICATED, PENDING, REPLICATED]]


@given(st.data())
@draws(200)
def test_local_items_are_those_of_the_fullest_device(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(2, 4), min_size=1, max_size=3)))
    subdims = tuple(data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3)))
    states = st.integers(PENDING, len(subdims) - 1)
    layout = data.draw(st.lists(states, min_size=len(shape), max_size=len(shape)))
    largest = max(
        np.prod([s.stop - s.start for s in region(subdims, layout, shape, device)])
        for device in devices(shape)
    )
    assert local_items(np.array([layout], np.int8), subdims, shape).tolist() == [largest]


def test_a_scalar_is_one_item() -> None:
    assert local_items(np.array([[PENDING]], np.int8), (), (4,)).tolist() == [1.0]


@pytest.mark.parametrize("axes", [0, 1, 3])
def test_distinct_rows_and_where_they_were(axes: int) -> None:
    rows = np.random.default_rng(0).integers(-1, 2, (20, axes)).astype(np.int8)
    unique, inverse = distinct(rows)
    assert np.array_equal(unique[inverse], rows)
    assert len(unique) == len({tuple(row) for row in rows.tolist()})
