"""The listed steps, performed on arrays, give every device what the target layout says."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draws import draws
from shardfold.cluster import mesh_from_text, parse
from shardfold.costs import Roofline, price
from shardfold.costs.model import VOLUME
from shardfold.costs.reshard import reshard, reshard_all
from shardfold.costs.steps import Collective
from shardfold.sharding.configs import is_legal_split
from shardfold.sharding.layouts import PENDING, REPLICATED
from virtual.movement import collect, larger_side_items, perform, place

Layout = tuple[int, ...]
CLUSTER = parse("8xa100")


def is_legal(layout: Layout, subdims: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    parts = [1] * len(subdims)
    for size, state in zip(shape, layout, strict=True):
        if state >= 0:
            parts[state] *= size
    return all(is_legal_split(n, p) for n, p in zip(subdims, parts, strict=True))


def layouts(subdims: tuple[int, ...], shape: tuple[int, ...]) -> list[Layout]:
    states = [REPLICATED, PENDING, *range(len(subdims))]
    return [row for row in product(states, repeat=len(shape)) if is_legal(row, subdims, shape)]


def steps_of(
    source: Layout, target: Layout, shape: tuple[int, ...], subdims: tuple[int, ...]
) -> list[Collective]:
    rows = (np.array([layout], np.int8) for layout in (source, target))
    return list(reshard(*rows, shape, subdims, 2, "forward").case(0))  # type: ignore[arg-type]


def check(source: Layout, target: Layout, shape: tuple[int, ...], subdims: tuple[int, ...]) -> None:
    """Perform the steps; after each, the shards must be what the step's own layout says."""
    rng = np.random.default_rng(0)
    value = rng.integers(-99, 99, subdims).astype(float)
    shards = place(value, source, shape, rng)
    now = source
    for step in steps_of(source, target, shape, subdims):
        assert tuple(step.before[0]) == now
        moved = perform(step, shards, shape)
        members = math.prod(shape[axis] for axis in step.axes)
        sent = 0 if step.kind == "slice" else 2 * larger_side_items(step, shards, moved, members)
        assert step.bytes.tolist() == [sent]
        shards, now = moved, tuple(int(s) for s in step.after[0])
        assert np.array_equal(collect(shards, subdims, now, shape), value), (step.kind, now)
    assert now == target
    assert min(array.size for array in shards.values()) > 0


@st.composite
def moves(draw: st.DrawFn) -> tuple[Layout, Layout, tuple[int, ...], tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(2, 4), min_size=1, max_size=3)))
    subdims = tuple(draw(st.lists(st.sampled_from([2, 3, 4, 5, 7, 8, 10, 12, 15, 16]), max_size=3)))
    known = layouts(subdims, shape)
    return draw(st.sampled_from(known)), draw(st.sampled_from(known)), shape, subdims


@given(moves())
@draws(400)
def test_every_device_ends_with_what_the_target_says(
    move: tuple[Layout, Layout, tuple[int, ...], tuple[int, ...]],
) -> None:
    check(*move)


@pytest.mark.parametrize(
    ("shape", "subdims"), [((2, 2), (4, 4)), ((2, 2), (10, 5)), ((3,), (7, 6))]
)
def test_every_pair_of_layouts_of_a_small_tensor(
    shape: tuple[int, ...], subdims: tuple[int, ...]
) -> None:
    known = layouts(subdims, shape)
    for source, target in product(known, known):
        check(source, target, shape, subdims)


def test_many_pairs_of_layouts_on_three_axes() -> None:
    shape, subdims = (2, 2, 2), (8, 16)
    pairs = list(product(layouts(subdims, shape), repeat=2))
    for source, target in pairs[:: len(pairs) // 500]:
        check(source, target, shape, subdims)


def test_rows_priced_together_are_rows_priced_alone() -> None:
    shape, subdims = (2, 2, 2), (8, 8)
    pairs = list(product(layouts(subdims, shape), repeat=2))
    together = reshard(
        np.array([a for a, _ in pairs], np.int8),
        np.array([b for _, b in pairs], np.int8),
        shape,
        subdims,
        2,
        "forward",
    )
    for row in range(0, len(pairs), 7):
        alone = steps_of(*pairs[row], shape, subdims)
        found = together.case(row)
        assert [(s.kind, s.axes, s.bytes.tolist()) for s in found] == [
            (s.kind, s.axes, s.bytes.tolist()) for s in alone
        ]


def test_all_pairs_are_the_pairs_one_by_one() -> None:
    shape, subdims = (2, 2), (8, 4)
    known = np.array(layouts(subdims, shape), np.int8)
    sources, targets = known[::2], known[1::3]
    together = reshard_all(sources, targets, shape, subdims, 2, "forward")
    one_by_one = reshard(
        np.repeat(sources, len(targets), axis=0),
        np.tile(targets, (len(sources), 1)),
        shape,
        subdims,
        2,
        "forward",
    )
    assert together.cases == one_by_one.cases
    for row in range(together.cases):
        a, b = together.case(row), one_by_one.case(row)
        assert [(s.kind, s.axes, s.bytes.tolist()) for s in a] == [
            (s.kind, s.axes, s.bytes.tolist()) for s in b
        ]


W = REPLICATED
FIXED = {
    "nothing to do": ((0, W), (0, W), []),
    "fully sharded weights are gathered": ((0, 0), (W, W), [("all_gather", (0, 1), 256)]),
    "their gradient is scattered": ((PENDING, PENDING), (0, 0), None),
    "data parallel's gradient": ((PENDING, PENDING), (W, W), [("all_reduce", (0, 1), 256)]),
    "tensor parallel's activation": ((0, PENDING), (0, W), [("all_reduce", (1,), 128)]),
    "sequence parallel's scatter": ((0, PENDING), (0, 1), [("reduce_scatter", (1,), 128)]),
    "sequence parallel's gather": ((0, 1), (0, W), [("all_gather", (1,), 128)]),
    "heads to sequence": ((W, 0), (W, 1), [("all_to_all", (1,), 128)]),
    "a replicated tensor is cut for free": (
        (W, W),
        (1, 0),
        [("slice", (0,), 0), ("slice", (1,), 0)],
    ),
    "a replicated tensor joins a sum for free": ((W, 0), (PENDING, 0), [("slice", (0,), 0)]),
}


@pytest.mark.parametrize("name", FIXED)
def test_known_moves(name: str) -> None:
    """A 16 x 8 tensor of 2-byte items on 2 x 2 devices: 256 bytes in all."""
    source, target, expected = FIXED[name]
    steps = steps_of(source, target, (2, 2), (16, 8))
    if expected is not None:
        assert [(s.kind, s.axes, int(s.bytes[0])) for s in steps] == expected
    check(source, target, (2, 2), (16, 8))


def test_scattering_over_two_axes_sends_no_more_than_over_one_of_both_sizes() -> None:
    """Together, or one after the other with what the first left: three quarters of 256 bytes."""
    steps = steps_of((PENDING, PENDING), (0, 0), (2, 2), (16, 8))
    assert {s.kind for s in steps} == {"reduce_scatter"}
    sent = [VOLUME[s.kind](2 ** len(s.axes)) * float(s.bytes[0]) for s in steps]
    assert sum(sent) == 192


def test_a_scalar_has_no_atoms_to_split() -> None:
    assert [s.kind for s in steps_of((PENDING,), (REPLICATED,), (4,), ())] == ["all_reduce"]
    check((PENDING,), (REPLICATED,), (4,), ())


def test_cutting_an_axis_in_two_never_sends_more() -> None:
    """Whatever one axis of 8 does, axes of 2 x 4 and 2 x 2 x 2 can do as well."""
    subdims = (4096, 4096, 64)
    states = [REPLICATED, PENDING, 0, 1, 2]
    for source, target in product(states, states):
        costs = []
        for shape in ("8", "2x4", "2x2x2"):
            mesh = mesh_from_text(shape, CLUSTER)
            count = len(mesh.axes)
            rows = (np.array([[state] * count], np.int8) for state in (source, target))
            steps = reshard(*rows, mesh.shape, subdims, 4, "forward")
            costs.append(float(price(steps, Roofline(CLUSTER, mesh))[0]))
        assert costs[1] <= costs[0] * (1 + 1e-9), (source, target, costs)
        assert costs[2] <= costs[1] * (1 + 1e-9), (source, target, costs)
