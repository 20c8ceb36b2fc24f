"""The boxes of all devices cover a tensor once, whatever its layout."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardfold.runtime.checkpoint.storage import part_of
from shardfold.runtime.lower import Stored
from shardfold.runtime.parameters import keeping
from shardfold.runtime.shards import Place, extent


@st.composite
def stored(draw: st.DrawFn) -> tuple[list[int], list[int], tuple[int, ...], tuple[int, ...]]:
    """Atoms and their dims, a mesh, and for each axis the atom that it splits or none."""
    dims = sorted(draw(st.lists(st.integers(0, 2), min_size=1, max_size=4)))
    dims = [sorted(set(dims)).index(dim) for dim in dims]
    subdims = [draw(st.integers(1, 5)) for _ in dims]
    mesh = tuple(draw(st.lists(st.integers(2, 3), min_size=1, max_size=3)))
    row = tuple(draw(st.integers(-1, len(subdims) - 1)) for _ in mesh)
    return subdims, dims, mesh, row


@given(stored())
def test_boxes_cover_the_whole(
    case: tuple[list[int], list[int], tuple[int, ...], tuple[int, ...]],
) -> None:
    subdims, dims, mesh, row = case
    rank = max(dims) + 1
    found = None
    for at in product(*map(range, mesh)):
        own = extent(subdims, dims, rank, row, Place(mesh, at))
        if found is None:
            expected = torch.arange(torch.tensor(own.whole).prod().item()).view(own.whole)
            found = torch.full_like(expected, -1)
        kept = keeping(Stored(0, row, own, mesh))
        part = part_of(kept.part(expected), kept)
        assert part.shape == own.whole
        for box in part.boxes:
            place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            assert torch.equal(box.tensor, expected[place])
            found[place] = box.tensor
    assert found is not None
    assert torch.equal(found, expected)
