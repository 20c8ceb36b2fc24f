"""The meshes worth searching: the finest grids that lie along a cluster's levels.

An axis lies within one level, so that all its links are alike, and a level of size n is cut into
axes whose sizes multiply to n. Two thoughts keep the list short without losing a plan:

- The links of one level are alike, so the order of the axes inside a level does not matter:
  2x4 and 4x2 are one candidate.
- Two axes may split the same factor, so whatever a mesh can express, a mesh that cuts one of
  its axes in two can express as well. Only meshes that cannot be cut further are candidates.

Cutting adds an axis, so a mesh is maximal if and only if it has `max_axes` axes already or all
its sizes are prime. By hand, for 8 nodes of 8 and three axes: 8x8 can be cut; 8x(2x4) and
(2x4)x8 cannot, and these two are the candidates.

Each level is factored by trial division, and a level has few factorisations into few parts
(512 nodes of 8 and three axes: five candidates), so the cost is about the square root of a
level's size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isqrt

from shardfold.cluster.level import Level
from shardfold.cluster.mesh import Axis, Mesh
from shardfold.errors import ClusterError


def factorisations(size: int, most: int, least: int = 2) -> Iterator[tuple[int, ...]]:
    """Every ascending tuple of at most `most` numbers from `least` up whose product is `size`.

    >>> list(factorisations(8, 3))
    [(2, 2, 2), (2, 4), (8,)]
    """
    if most < 1:
        return
    for first in range(least, isqrt(size) + 1):
        if size % first == 0:
            for rest in factorisations(size // first, most - 1, first):
                yield (first, *rest)
    yield (size,)


def all_meshes(levels: Sequence[Level], max_axes: int) -> Iterator[Mesh]:
    """Every mesh along `levels` with at most `max_axes` axes, sizes ascending in each level."""
    for groups in _cuts([level.size for level in levels], max_axes):
        yield mesh_of(levels, groups)


def _cuts(sizes: Sequence[int], most: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to factor each of `sizes`, with at most `most` factors in all."""
    if not sizes:
        yield ()
        return
    first, *others = sizes
    for group in factorisations(first, most - len(others)):
        for rest in _cuts(others, most - len(group)):
            yield (group, *rest)


def maximal_meshes(levels: Sequence[Level], max_axes: int) -> tuple[Mesh, ...]:
    """The meshes of `all_meshes` that no other of them refines, by shape."""
    if len(levels) > max_axes:
        raise ClusterError(
            f"No legal mesh: an axis lies within one level, and the cluster has {len(levels)} "
            f"({', '.join(level.name for level in levels)}), so a mesh needs as many axes; at most "
            f"{max_axes} were allowed. Allow more axes, or describe the cluster with fewer levels."
        )
    meshes = all_meshes(levels, max_axes)
    return tuple(mesh for mesh in meshes if len(mesh.axes) == max_axes or _is_prime(mesh))


def mesh_of(levels: Sequence[Level], groups: Sequence[Sequence[int]]) -> Mesh:
    """The mesh whose axes on the i-th level have the sizes `groups[i]`.

    A level's only axis bears its name (`gpu`); several are numbered (`gpu0`, `gpu1`).
    """
    axes: list[Axis] = []
    for index, (level, sizes) in enumerate(zip(levels, groups, strict=True)):
        for position, size in enumerate(sizes):
            name = level.name if len(sizes) == 1 else f"{level.name}{position}"
            axes.append(Axis(name, size, index))
    return Mesh(tuple(axes))


def _is_prime(mesh: Mesh) -> bool:
    return all(len(list(factorisations(size, 2))) == 1 for size in mesh.shape)
