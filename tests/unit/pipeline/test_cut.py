"""The outermost links are cut first, and messages cross the outermost that differ."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardfold.api import plan
from shardfold.capture.capture import capture_short
from shardfold.cluster import parse
from shardfold.errors import ClusterError
from shardfold.pipeline.cut import Layers, cut_cluster, leaves_out_layers


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


class Stage(nn.Sequential):
    """Blocks that are alike, after another that is not."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__(nn.Linear(width // 2, width), *(Block(width) for _ in range(blocks)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.slow
def test_a_model_whose_repeated_blocks_are_within_its_layers_is_planned_in_stages() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Stage(64, 3), Stage(128, 9), Stage(256, 3))
        batch = torch.zeros(16, 32)
    graph = capture_short(model, (batch,), loss=Tensor.mean)
    assert len(Layers.of(graph)) == 3
    assert leaves_out_layers(graph)
    found = plan(model, (batch,), cluster="4xa100", loss=Tensor.mean, pipeline=2, fold=True)
    assert found.pipeline is not None
