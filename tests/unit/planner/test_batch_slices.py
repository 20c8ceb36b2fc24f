"""Batches in equal parts, by place and dim."""

import numpy as np
import pytest

from shardfold.errors import InputError
from shardfold.planner.batch_slices import cut, first_part


def test_parts_are_cut_where_the_plan_says_and_all_else_is_whole():
    x, mask = np.arange(24).reshape(6, 4), np.ones((6, 6))
    kwargs = {"batch": {"y": x.T, "names": ["a", None]}, "scale": 2.0}
    parts = cut((x, mask), kwargs, {"0": 0, "batch.y": 1}, 3)
    assert len(parts) == 3
    assert np.concatenate([args[0] for args, _ in parts]).tolist() == x.tolist()
    assert np.concatenate([k["batch"]["y"] for _, k in parts], 1).tolist() == x.T.tolist()
    assert all(args[1] is mask for args, _ in parts)
    assert parts[1][1]["scale"] == 2.0
    assert parts[1][1]["batch"]["names"] == ["a", None]
    assert first_part((x, mask), kwargs, {"0": 0}, 3)[0][0].tolist() == x[:2].tolist()


def test_one_part_is_the_batch_itself():
    x = np.ones((5, 2))
    assert cut((x,), {}, {}, 1) == [((x,), {})]


def test_what_does_not_divide_is_refused_with_the_numbers():
    with pytest.raises(InputError, match=r"6 samples \(dim 0 of \(6, 2\)\).* into 4 equal"):
        cut((np.ones((6, 2)),), {}, {"0": 0}, 4)
    with pytest.raises(InputError, match="no dim 1"):
        cut((np.ones(6),), {}, {"0": 1}, 2)
