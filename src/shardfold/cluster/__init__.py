"""Clusters: devices, levels of links, and the meshes that lie along them."""

from shardfold.cluster.cluster import Cluster
from shardfold.cluster.device import Device
from shardfold.cluster.level import Level
from shardfold.cluster.mesh import Axis, Mesh

__all__ = ["Axis", "Cluster", "Device", "Level", "Mesh"]
