"""Clusters and meshes as the words a user types: `4x8xh100`, `lab.toml`, `8x4`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from shardfold.cluster.candidates import all_meshes, mesh_of
from shardfold.cluster.catalog import find_hardware, hardware_names
from shardfold.cluster.cluster import Cluster
from shardfold.cluster.files import read_cluster
from shardfold.cluster.mesh import Mesh
from shardfold.errors import ClusterError, nearest

_SIZES_THEN_NAME = re.compile(r"((?:[0-9]{1,12}x)*)(.*)", re.DOTALL)
_SHOWN = 8


def parse(text: str | os.PathLike[str]) -> Cluster:
    """The cluster that `text` names, or that the file at `text` describes.

    >>> parse("4x8xh100").size
    32
    >>> parse("1x8xa100").name
    '8xa100-80g'
    """
    if isinstance(text, os.PathLike):
        return read_cluster(Path(text))
    match = _SIZES_THEN_NAME.fullmatch(text.strip().lower())
    assert match is not None, "the pattern matches any text"
    numbers, name = match.groups()
    if name in hardware_names():
        return find_hardware(name).cluster([int(size) for size in numbers.split("x") if size])
    if _looks_like_a_path(text):
        return read_cluster(Path(text))
    raise ClusterError(
        f"Unknown cluster {text[:80]!r}. {nearest(name, hardware_names())} "
        f"A cluster is written 8xa100 (one node of 8) or 4x8xh100 (4 nodes of 8), "
        f"or is a .toml or .json file."
    )


def mesh_from_text(text: str, cluster: Cluster) -> Mesh:
    """The mesh of `cluster` whose axes have the sizes in `text`, outermost first.

    The sizes fill the levels in order, each level by the product of one or more of them. There
    is at most one way to do so, as running products only grow.
    """
    sizes = _mesh_sizes(text, cluster)
    groups: list[list[int]] = []
    rest = sizes
    for level in cluster.levels:
        group, rest = _fill(level.size, rest)
        if not group:
            raise _no_mesh(text, cluster)
        groups.append(group)
    if rest:
        raise _no_mesh(text, cluster)
    return mesh_of(cluster.levels, groups)


def _fill(size: int, sizes: list[int]) -> tuple[list[int], list[int]]:
    """Split off the leading sizes that multiply to `size`; none, if they do not."""
    product = 1
    for count, factor in enumerate(sizes, start=1):
        product *= factor
        if product >= size:
            return (sizes[:count], sizes[count:]) if product == size else ([], sizes)
    return [], sizes


def _mesh_sizes(text: str, cluster: Cluster) -> list[int]:
    """The sizes in `text` without the ones: an axis of one device splits nothing."""
    words = text.strip().lower().split("x")
    if not all(re.fullmatch(r"[0-9]{1,12}", word) and int(word) > 0 for word in words):
        raise ClusterError(
            f"Mesh {text[:80]!r} is not sizes joined by x, such as 8x4. {_legal(cluster)}"
        )
    return [int(word) for word in words if int(word) > 1]


def _no_mesh(text: str, cluster: Cluster) -> ClusterError:
    levels = " of ".join(f"{level.size} ({level.name})" for level in cluster.levels)
    return ClusterError(
        f"Mesh {text!r} does not lie along cluster {cluster.name}, which has {cluster.size} "
        f"devices{': ' + levels if levels else ''}; each level is the product of the axes on it, "
        f"outermost first. {_legal(cluster)}"
    )


def _legal(cluster: Cluster) -> str:
    max_axes = max(3, len(cluster.levels) + 1)
    meshes = sorted(all_meshes(cluster.levels, max_axes), key=lambda mesh: len(mesh.axes))
    shown = ", ".join(map(str, meshes[:_SHOWN]))
    return f"Legal meshes{' include' if len(meshes) > _SHOWN else ''}: {shown}."


def _looks_like_a_path(text: str) -> bool:
    suffix = Path(text).suffix
    return "/" in text or os.sep in text or suffix[1:].isalpha() or os.path.isfile(text)
