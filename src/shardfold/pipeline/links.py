"""The part of a cluster that each stage has: the outermost links are cut first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardfold.cluster import Cluster, Mesh
from shardfold.cluster.mesh import Axis
from shardfold.errors import ClusterError


@dataclass(frozen=True, slots=True)
class StageLinks:
    """The cluster of one stage, and a mesh whose axes are the stages alone."""

    stage: Cluster
    between: Mesh
    outer: int  # levels of the whole cluster that a stage has nothing of

    def hop(self, first: int, second: int) -> int:
        """The axis that a message between two stages crosses: the outermost that differs."""
        inner = self.between.size
        for number, axis in enumerate(self.between.axes):
            inner //= axis.size
            if first // inner != second // inner:
                return number
        raise AssertionError(f"{first} and {second} are one stage.")

    def sends_parts(self, hop: int, axes: Sequence[Axis]) -> bool:
        """Whether devices along some axes of a stage share out a message that all of them have.

        Each sends a part over the links between stages, and the receivers gather it, where their
        own links are faster: further in.
        """
        level = self.between.axes[hop].level
        return bool(axes) and min(axis.level for axis in axes) + self.outer > level


def cut_cluster(cluster: Cluster, stages: int) -> StageLinks:
    """Equal parts of a cluster, for so many stages."""
    left, axes, levels = stages, list[Axis](), []
    for number, level in enumerate(cluster.levels):
        size = math.gcd(left, level.size)
        if size not in (left, level.size):
            break
        left //= size
        levels.append(replace(level, size=level.size // size))
        if size > 1:
            axes.append(Axis(level.name, size, number))
    if left > 1:
        raise ClusterError(
            f"pp={stages} does not lie along the cluster {cluster.name}: stages take whole groups "
            f"of its levels ({' x '.join(f'{each.size} {each.name}' for each in cluster.levels)}), "
            f"the outermost first. Try pp={_nearest(cluster, stages)}."
        )
    stage = replace(cluster, levels=tuple(levels))
    return StageLinks(stage, Mesh(tuple(axes)), len(cluster.levels) - len(stage.levels))


def _nearest(cluster: Cluster, stages: int) -> int:
    """The nearest number of stages that the levels allow."""
    found, outside = {1}, 1
    for level in cluster.levels:
        found |= {outside * n for n in range(1, level.size + 1) if level.size % n == 0}
        outside *= level.size
    return min(found, key=lambda number: (abs(number - stages), number))
