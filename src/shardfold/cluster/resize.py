"""The same kind of cluster with another number of devices: when some are lost, or come back."""

from __future__ import annotations

from dataclasses import replace

from shardfold.cluster.cluster import Cluster
from shardfold.errors import ClusterError


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
