"""Routes across a cut: every device ends up with its part, each tile goes once, nothing is lost."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from shardfold.pipeline.boundary import End, copies, route, taken
from shardfold.sharding.layouts import PENDING, REPLICATED, coordinates

SHAPES = ((), (2,), (3,), (4,), (2, 2), (2, 3), (2, 2, 2))


def drawn(rng: random.Random, sizes: tuple[int, ...]) -> End:
    shape = rng.choice(SHAPES)
    states = [*range(len(sizes)), REPLICATED, PENDING]
    return End(shape, tuple(rng.choice(states) for _ in shape))


def cut(bounds: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in bounds)


def parts_of(whole: np.ndarray, end: End, rng: np.random.Generator) -> list[np.ndarray]:
    """What each device has: along PENDING axes, parts of a sum."""
    places = list(coordinates(end.shape))
    pending = end.axes(PENDING)
    last = tuple(end.shape[a] - 1 for a in pending)
    shares: dict[tuple[int, ...], np.ndarray] = {}
    for numbers in coordinates([end.shape[a] for a in pending]):
        if numbers != last:
            shares[numbers] = rng.integers(0, 9, whole.shape)
    shares[last] = whole - sum(shares.values(), start=np.zeros_like(whole))
    return [
        shares[tuple(at[a] for a in pending)][cut(end.bounds(whole.shape, at))] for at in places
    ]


def test_every_device_gets_its_part_and_each_tile_goes_out_once() -> None:
    """A sum on the far side is whole on one device, and nothing on the others."""
    rng, numbers = random.Random(0), np.random.default_rng(0)
    shared = once = 0
    for _ in range(300):
        sizes = tuple(rng.choice((1, 4, 5, 6)) for _ in range(rng.randint(1, 3)))
        source, target = drawn(rng, sizes), drawn(rng, sizes)
        shares = copies(target) if rng.random() < 0.5 else ()
        shared += bool(shares)
        whole = numbers.integers(0, 9, sizes)
        held = parts_of(whole, source, numbers)
        found = route(sizes, source, target, shares)
        origins, places = (list(coordinates(end.shape)) for end in (source, target))
        added = dict(zip(origins, held, strict=True))
        for axis in found.summed:
            added = {
                at: sum(added[(*at[:axis], k, *at[axis + 1 :])] for k in range(source.shape[axis]))
                for at in origins
            }
        given = [np.zeros(sizes, dtype=np.int64) for _ in places]
        for piece in found.pieces:
            begin = source.bounds(sizes, origins[piece.sender])
            within = tuple(
                slice(low - first, high - first)
                for (low, high), (first, _) in zip(piece.bounds, begin, strict=True)
            )
            given[piece.receiver][cut(piece.bounds)] += added[origins[piece.sender]][within]
        gathered = [
            sum(
                given[places.index(other)]
                for other in places
                if all(
                    a == b
                    for axis, (a, b) in enumerate(zip(at, other, strict=True))
                    if axis not in found.gathered
                )
            )
            for at in places
        ]
        if source == target:
            expected = held
        else:
            is_first = [not any(at[a] for a in target.axes(PENDING)) for at in places]
            expected = [
                whole[cut(target.bounds(sizes, at))] * first
                for at, first in zip(places, is_first, strict=True)
            ]
        for at, mine, wanted in zip(places, gathered, expected, strict=True):
            assert (mine[cut(target.bounds(sizes, at))] == wanted).all()
        if source != target and set(copies(target)) == set(shares):
            once += 1
            assert sum(piece.items for piece in found.pieces) == math.prod(sizes)
    assert shared > 40
    assert once > 100


def test_devices_with_the_same_tile_take_turns_and_receivers_share_it_out() -> None:
    whole, halves = End((4,), (REPLICATED,)), End((2,), (0,))
    found = route((8,), whole, halves)
    assert [(p.sender, p.receiver, p.bounds) for p in found.pieces] == [
        (0, 0, ((0, 4),)),
        (1, 1, ((4, 8),)),
    ]
    back = route((8,), halves, whole, (0,))
    assert [(p.sender, p.receiver) for p in back.pieces] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert back.busiest == (4, 2)
    assert taken((8,), whole, (0,), 0, (3,)) == ((6, 8),)


@pytest.mark.parametrize("row", [(0, REPLICATED), (REPLICATED, REPLICATED), (PENDING, 1)])
def test_between_stages_that_are_alike_each_device_sends_to_the_one_in_its_place(
    row: tuple[int, int],
) -> None:
    """As much as is priced there: what a device has, or its share of what several have."""
    end = End((2, 2), row)
    for shares in ((), copies(end)):
        found = route((8, 4), end, end, shares)
        assert [(p.sender, p.receiver) for p in found.pieces] == [(k, k) for k in range(4)]
        assert found.summed == ()
        members = math.prod(end.shape[axis] for axis in shares)
        assert found.busiest == (end.items((8, 4)) // members, 1)
