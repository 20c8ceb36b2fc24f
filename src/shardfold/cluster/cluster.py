"""A cluster: one kind of device, and the levels of links that join the devices."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from shardfold.cluster.candidates import maximal_meshes
from shardfold.cluster.device import Device
from shardfold.cluster.level import Level
from shardfold.cluster.mesh import Mesh
from shardfold.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal devices joined by `levels` of links, outermost first.

    A level of size 1 joins nothing and is dropped, so that equal clusters compare equal. One
    device is the cluster without levels.
    """

    name: str
    device: Device
    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        names = [level.name for level in self.levels]
        if len(set(names)) != len(names):
            raise ClusterError(
                f"Cluster {self.name}: level names must be unique, got {', '.join(names)}."
            )
        kept = tuple(level for level in self.levels if level.size > 1)
        object.__setattr__(self, "levels", kept)

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(level.size for level in self.levels)

    def meshes(self, max_axes: int = 3) -> tuple[Mesh, ...]:
        """The meshes to search: every finest one along the levels with at most `max_axes` axes."""
        return maximal_meshes(self.levels, max_axes)

    def as_plain(self) -> dict[str, Any]:
        """The cluster as JSON values, in the form of a cluster file: reading it gives it back."""
        plain = asdict(self)
        plain["device"]["peak_flops"] = dict(self.device.peak_flops)
        plain["levels"] = [
            {field: value for field, value in level.items() if value is not None}
            for level in plain["levels"]
        ]
        return plain
