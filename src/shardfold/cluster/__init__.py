"""Clusters: devices, levels of links, and the meshes that follow them."""

from shardfold.cluster.catalog import Hardware, catalog
from shardfold.cluster.cluster import Cluster
from shardfold.cluster.hardware import Device, Level
from shardfold.cluster.mesh import Axis, Mesh
from shardfold.cluster.parse import from_plain, mesh_from_text, parse

__all__ = [
    "Axis",
    "Cluster",
    "Device",
    "Hardware",
    "Level",
    "Mesh",
    "catalog",
    "from_plain",
    "mesh_from_text",
    "parse",
]
