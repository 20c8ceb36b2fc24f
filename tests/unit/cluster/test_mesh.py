from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfold.cluster import Axis, Cluster, Level, Mesh, parse
from shardfold.cluster.mesh import factorisations, mesh_of
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


def cluster(*sizes: int) -> Cluster:
    names = ("rack", "node", "board", "gpu")[-len(sizes) :] if sizes else ()
    levels = tuple(
        Level(name, size, 1e9, 1e-6, "made up") for name, size in zip(names, sizes, strict=True)
    )
    return Cluster("toy", parse("cpu").device, levels)


@pytest.mark.parametrize(
    ("sizes", "max_axes", "shapes"),
    [
        ((), 3, ["1"]),
        ((8,), 3, ["2x2x2"]),
        ((8,), 2, ["2x4"]),
        ((8,), 1, ["8"]),
        ((7,), 3, ["7"]),
        ((64,), 3, ["2x2x16", "2x4x8", "4x4x4"]),
        ((8, 8), 3, ["2x4x8", "8x2x4"]),
        ((8, 8), 2, ["8x8"]),
        ((4, 8), 3, ["2x2x8", "4x2x4"]),
        ((2, 7), 3, ["2x7"]),
        ((512, 8), 3, ["2x256x8", "4x128x8", "8x64x8", "16x32x8", "512x2x4"]),
        ((2, 4, 8), 3, ["2x4x8"]),
        ((1, 8), 3, ["2x2x2"]),
        ((999_983, 2), 3, ["999983x2"]),
    ],
)
def test_candidates_by_hand(sizes: tuple[int, ...], max_axes: int, shapes: list[str]) -> None:
    assert [str(mesh) for mesh in cluster(*sizes).meshes(max_axes)] == shapes


def test_axes_are_named_after_their_level() -> None:
    names = [mesh.names for mesh in cluster(4, 8).meshes()]
    assert names == [("board0", "board1", "gpu"), ("board", "gpu0", "gpu1")]


def test_more_levels_than_axes_have_no_legal_mesh() -> None:
    with pytest.raises(
        ClusterError, match=r"No legal mesh: .* has 3 \(node, board, gpu\).* most 2"
    ):
        cluster(2, 2, 2).meshes(max_axes=2)


def coarsenings(mesh: Mesh) -> set[tuple[tuple[int, ...], ...]]:
    """Every mesh that results from merging two axes of one level, as sorted sizes per level."""
    merged = set()
    for first, second in product(range(len(mesh.axes)), repeat=2):
        if first < second and mesh.axes[first].level == mesh.axes[second].level:
            kept = [(a.level, a.size) for i, a in enumerate(mesh.axes) if i not in (first, second)]
            kept.append((mesh.axes[first].level, mesh.shape[first] * mesh.shape[second]))
            merged.add(key(kept))
    return merged


def key(axes: list[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    levels = max((level for level, _ in axes), default=-1) + 1
    return tuple(tuple(sorted(s for lv, s in axes if lv == level)) for level in range(levels))


@pytest.mark.parametrize("sizes", list(product([2, 3, 4, 6, 8, 12, 16], [2, 4, 7, 8])))
@pytest.mark.parametrize("max_axes", [2, 3, 4, 5])
def test_candidates_are_the_maximal_ones_of_all(sizes: tuple[int, int], max_axes: int) -> None:
    every = {key(axes) for axes in all_by_brute_force(sizes, max_axes)}
    meshes = cluster(*sizes).meshes(max_axes)
    found = [key([(axis.level, axis.size) for axis in mesh.axes]) for mesh in meshes]
    assert len(set(found)) == len(found)
    assert set(found) <= every
    below, frontier = set[tuple[tuple[int, ...], ...]](), list(meshes)
    while frontier:
        step = coarsenings(frontier.pop())
        frontier += [as_mesh(groups) for groups in step - below]
        below |= step
    assert not below & set(found), "a candidate is contained in another"
    assert below | set(found) == every, "a mesh is contained in no candidate"


def as_mesh(groups: tuple[tuple[int, ...], ...]) -> Mesh:
    return mesh_of(cluster(*map(prod, groups)).levels, groups)


def all_by_brute_force(sizes: tuple[int, ...], max_axes: int) -> list[list[tuple[int, int]]]:
    """Every assignment of sizes to axes, by trying all tuples of divisors of each level."""
    per_level = []
    for level, size in enumerate(sizes):
        divisors = [d for d in range(2, size + 1) if size % d == 0]
        cuts = [
            [(level, d) for d in cut]
            for length in range(1, max_axes + 1)
            for cut in product(divisors, repeat=length)
            if prod(cut) == size
        ]
        per_level.append(cuts)
    joined = ([axis for cut in cuts for axis in cut] for cuts in product(*per_level))
    return [axes for axes in joined if len(axes) <= max_axes]


def test_factorisations_are_ascending_and_distinct() -> None:
    for size in range(2, 200):
        found = list(factorisations(size, 4))
        assert len(set(found)) == len(found)
        assert all(prod(f) == size and list(f) == sorted(f) and min(f) > 1 for f in found)


@given(st.lists(st.integers(1, 200), max_size=3), st.integers(3, 5))
def test_every_candidate_has_all_devices_and_lies_along_the_levels(
    sizes: list[int], max_axes: int
) -> None:
    toy = cluster(*sizes)
    meshes = toy.meshes(max_axes)
    assert meshes
    assert len(set(meshes)) == len(meshes)
    for mesh in meshes:
        assert mesh.size == toy.size == prod(sizes)
        assert len(mesh.axes) <= max_axes
        for index, level in enumerate(toy.levels):
            assert prod(axis.size for axis in mesh.axes if axis.level == index) == level.size
