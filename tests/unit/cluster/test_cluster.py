"""Clusters with other numbers of devices: the links keep their figures."""

from __future__ import annotations

import pytest

from shardfold.cluster import parse
from shardfold.cluster.cluster import resized
from shardfold.errors import ClusterError


def shape(devices: int, within: int, text: str = "4x8xh100") -> list[tuple[str, int]]:
    return [(level.name, level.size) for level in resized(parse(text), devices, within).levels]


def test_nodes_are_lost_and_found() -> None:
    assert shape(24, 8) == [("node", 3), ("gpu", 8)]
    assert shape(8, 8) == [("gpu", 8)]
    assert shape(4, 1) == [("node", 4)]
    assert shape(1, 1) == []
    assert shape(6, 6, "8xh100") == [("gpu", 6)]
    assert shape(40, 8) == [("node", 5), ("gpu", 8)]


def test_figures_stay() -> None:
    before, after = parse("4x8xh100"), resized(parse("4x8xh100"), 16, 8)
    assert after.device == before.device
    assert [level.bandwidth for level in after.levels] == [lv.bandwidth for lv in before.levels]
    assert after.size == 16


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ClusterError, match="cannot be in groups of 4"):
        shape(6, 4)
    with pytest.raises(ClusterError, match="no links"):
        shape(2, 2, "1xh100")
