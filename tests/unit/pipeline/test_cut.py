"""The outermost links are cut first, and messages cross the outermost that differ."""

from __future__ import annotations

import pytest

from shardfold.cluster import parse
from shardfold.errors import ClusterError
from shardfold.pipeline.cut import cut_cluster


def test_stages_take_whole_groups_of_the_outermost_level_first() -> None:
    cluster = parse("4x8xh100")
    two, eight = cut_cluster(cluster, 2), cut_cluster(cluster, 8)
    assert [level.size for level in two.stage.levels] == [2, 8]
    assert [level.size for level in eight.stage.levels] == [4]
    assert str(eight.between) == "4x2"
    assert [eight.between.axes[eight.hop(k, k + 1)].name for k in range(3)] == [
        "gpu",
        "node",
        "gpu",
    ]
    assert eight.hop(0, 7) == 0
    assert cut_cluster(cluster, 32).stage.size == 1


@pytest.mark.parametrize(("stages", "near"), [(3, 2), (6, 4), (5, 4), (64, 32)])
def test_a_number_that_the_levels_do_not_allow_is_refused(stages: int, near: int) -> None:
    with pytest.raises(ClusterError, match=rf"pp={stages} does not lie along .* Try pp={near}\."):
        cut_cluster(parse("4x8xh100"), stages)
