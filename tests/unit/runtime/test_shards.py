"""Where parts begin and end, and which random bits fall on them."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from shardfold.runtime.ops.counter_rng import keep_mask, linear_positions, pieces_of
from shardfold.runtime.ops.local_op import Context
from shardfold.runtime.process_groups import Groups
from shardfold.runtime.shards import Place, bounds_of, extent

MESH = (2, 3)
CPU = torch.device("cpu")


def places() -> list[Place]:
    return [Place.of_rank(rank, MESH) for rank in range(math.prod(MESH))]


def context(step: int = 0, seed: int = 0) -> Context:
    return Context(Groups(places()[0]), CPU, seed=seed, step=step)


def test_ranks_and_places_are_the_same_thing() -> None:
    assert [place.rank(place.at) for place in places()] == list(range(6))
    assert places()[4].members((0,)) == [(0, 1), (1, 1)]
    assert places()[4].members((0, 1)) == list(product(range(2), range(3)))


@pytest.mark.parametrize("size", [6, 7, 10, 11, 13])
def test_parts_of_an_atom_follow_each_other_and_leave_nothing_out(size: int) -> None:
    bounds = [bounds_of((size,), (0, 0), MESH, place.at)[0] for place in places()]
    covered = [n for low, high in bounds for n in range(low, high)]
    assert covered == list(range(size))
    assert max(high - low for low, high in bounds) == math.ceil(size / 6)


@pytest.mark.parametrize("row", [(-1, -1), (0, 1), (2, 0), (1, 1), (-1, 2)])
def test_positions_of_a_part_are_those_of_the_whole(row: tuple[int, int]) -> None:
    """Dims of 4 and 3 x 6: the second is in two pieces."""
    subdims, dims = (4, 3, 6), (0, 1, 1)
    whole = torch.arange(72).view(subdims)
    for place in places():
        part = extent(subdims, dims, 2, row, place)
        own = whole[tuple(slice(low, high) for low, high in part.bounds)].reshape(part.shape)
        assert torch.equal(linear_positions(pieces_of(part), CPU), own)
        assert part.whole == (4, 18)


@pytest.mark.parametrize("row", [(0, 0), (0, 2), (1, -1)])
def test_a_part_draws_the_mask_of_the_whole(row: tuple[int, int]) -> None:
    subdims, dims = (8, 5, 6), (0, 1, 1)
    whole = extent(subdims, dims, 2, (-1, -1), places()[0])
    mask = keep_mask(pieces_of(whole), 0.4, context(), 7).view(subdims)
    for place in places():
        part = extent(subdims, dims, 2, row, place)
        own = mask[tuple(slice(low, high) for low, high in part.bounds)].reshape(part.shape)
        assert torch.equal(keep_mask(pieces_of(part), 0.4, context(), 7), own)


def test_masks_keep_the_right_share_and_differ_between_steps_operators_and_seeds() -> None:
    pieces = [[(400, (0, 400))], [(500, (0, 500))]]
    masks = [
        keep_mask(pieces, 0.3, context(step, seed), operator)
        for step, seed, operator in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))
    ]
    for mask in masks:
        assert abs(float(mask.double().mean()) - 0.7) < 0.005
        # No rows or columns that are alike: each keeps about its share.
        assert float(mask.double().mean(0).std()) < 0.04
        assert float(mask.double().mean(1).std()) < 0.04
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert abs(float((a == b).double().mean()) - 0.58) < 0.01
