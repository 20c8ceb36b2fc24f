"""Even parts of a tensor, and the whole that they make up."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from shardfold.graph import TensorType
from shardfold.runtime.reshard import Lie, Woven
from shardfold.runtime.shards import Place
from shardfold.sharding.layouts import PENDING, REPLICATED

SHAPE = (2, 2, 2)
ATOMS = (8, 8, 16)
DIMS = (0, 0, 1)  # the first dim has two atoms
WHOLE = (REPLICATED,) * 3
LEVELS = (0, 0, 0)


def lie(at=(0, 0, 0), subdims=ATOMS):
    sizes = (subdims[0] * subdims[1], subdims[2])
    return Lie(TensorType(sizes, "float32"), subdims, DIMS, Place(SHAPE, at))


def part_of(whole, row, at):
    extent = lie(at).extent(row)
    pieces = whole.reshape(ATOMS)
    for atom, (low, high) in enumerate(extent.bounds):
        pieces = pieces.narrow(atom, low, high - low)
    return pieces.reshape(-1)


@pytest.mark.parametrize("row", sorted(product((REPLICATED, 0, 1, 2), repeat=3)))
def test_parts_and_whole_are_each_others_inverse(row):
    if row == WHOLE:
        return
    there = lie().moves(row, WHOLE, "forward")
    pending = tuple(PENDING if state >= 0 else state for state in row)
    back = lie().moves(pending, row, "backward")
    gather, scatter = there.at_once("all_gather", LEVELS), back.at_once("reduce_scatter", LEVELS)
    assert gather is not None
    assert scatter is not None
    whole = torch.arange(8 * 8 * 16.0).reshape(64, 16)
    place = Place(SHAPE, (0, 0, 0))
    for moves, axes in ((there, gather), (back, scatter)):
        stacked = torch.stack([part_of(whole, row, at) for at in place.members(axes)])
        woven = Woven.of(moves, axes, place)
        assert woven.whole(stacked).reshape(64, 16).equal(whole)
        assert woven.parts(whole).equal(stacked)


def test_what_is_uneven_or_crosses_levels_is_several():
    there = lie().moves((0, 2, REPLICATED), WHOLE, "forward")
    assert there.at_once("all_gather", LEVELS) == (0, 1)
    assert there.at_once("all_gather", (0, 1, 1)) is None
    assert there.at_once("reduce_scatter", LEVELS) is None
    uneven = lie(subdims=(7, 8, 16)).moves((0, 2, REPLICATED), WHOLE, "forward")
    assert uneven.at_once("all_gather", LEVELS) is None
    one = lie(subdims=(7, 8, 16)).moves((0, REPLICATED, REPLICATED), WHOLE, "forward")
    assert one.at_once("all_gather", LEVELS) == (0,)
