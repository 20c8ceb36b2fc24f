from __future__ import annotations

import pytest

from shardfold.cluster import Axis, Mesh
from shardfold.errors import ClusterError


def test_a_mesh_reads_outermost_first() -> None:
    mesh = Mesh((Axis("node", 4, 0), Axis("gpu0", 2, 1), Axis("gpu1", 3, 1)))
    assert (str(mesh), mesh.size, mesh.shape) == ("4x2x3", 24, (4, 2, 3))
    assert mesh.names == ("node", "gpu0", "gpu1")


def test_one_device_is_the_mesh_without_axes() -> None:
    assert (str(Mesh(())), Mesh(()).size, Mesh(()).names) == ("1", 1, ())


def test_names_are_unique() -> None:
    with pytest.raises(ClusterError, match="names must be unique, got a, a"):
        Mesh((Axis("a", 2, 0), Axis("a", 2, 0)))


def test_levels_go_inwards() -> None:
    with pytest.raises(ClusterError, match=r"gpu \(level 1\) stands before node \(level 0\)"):
        Mesh((Axis("gpu", 2, 1), Axis("node", 2, 0)))


@pytest.mark.parametrize("size", [1, 0, -2])
def test_an_axis_has_at_least_two_devices(size: int) -> None:
    with pytest.raises(ClusterError, match=f"'a' needs at least 2 devices, got {size}"):
        Axis("a", size, 0)
