"""A cluster: one kind of device, and the levels of links that join the devices.

The same kind of cluster with another number of devices: when some are lost, or come back.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardfold.cluster.hardware import Device, Level
from shardfold.cluster.mesh import Mesh, maximal_meshes
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
        plain["device"]["attention_efficiency"] = list(self.device.attention_efficiency)
        if self.device.units is None:
            del plain["device"]["units"]
        plain["levels"] = [
            {field: value for field, value in level.items() if value is not None}
            for level in plain["levels"]
        ]
        return plain


def resized(cluster: Cluster, devices: int, within: int) -> Cluster:
    """The cluster of `devices` devices, `within` of them in each group of the innermost level.

    Links keep their figures. Levels between the outermost and the innermost are left out, as
    nobody says how the groups lie on them. One level has all the devices: the innermost where
    they are all in one group, else the outermost.
    """
    if devices < 1 or within < 1 or devices % within:
        raise ClusterError(
            f"{devices} devices cannot be in groups of {within}: start as many processes on every "
            "node."
        )
    name = f"{devices} devices of {cluster.name}"
    if devices == 1 or not cluster.levels:
        if devices > 1:
            raise ClusterError(
                f"Cluster {cluster.name} has one device and no links: describe the links among "
                f"{devices} in a cluster file, and plan for it."
            )
        return Cluster(name, cluster.device, ())
    outer, inner = cluster.levels[0], cluster.levels[-1]
    if len(cluster.levels) == 1 or within == devices:
        return Cluster(name, cluster.device, (replace(inner, size=devices),))
    if within == 1:
        return Cluster(name, cluster.device, (replace(outer, size=devices),))
    groups = replace(outer, size=devices // within)
    return Cluster(name, cluster.device, (groups, replace(inner, size=within)))
