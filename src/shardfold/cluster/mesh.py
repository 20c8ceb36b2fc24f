"""A mesh: the devices of a cluster as a grid with named axes, apart from any real device.

The meshes worth searching: the finest grids that lie along a cluster's levels.

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

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt

from shardfold.cluster.hardware import Level
from shardfold.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Axis:
    """A direction of a mesh; its `size` devices talk over the links of one cluster level."""

    name: str
    size: int
    level: int

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ClusterError(
                f"Mesh axis {self.name!r} needs at least 2 devices, got {self.size}."
            )
        if self.level < 0:
            raise ClusterError(f"Mesh axis {self.name!r} has the negative level {self.level}.")


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of devices with named axes, slowest-varying (outermost) first.

    One device is the mesh without axes.

    >>> mesh = Mesh((Axis("node", 4, 0), Axis("gpu", 8, 1)))
    >>> str(mesh), mesh.size, mesh.names
    ('4x8', 32, ('node', 'gpu'))
    """

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            raise ClusterError(f"Mesh axis names must be unique, got {', '.join(self.names)}.")
        for outer, inner in pairwise(self.axes):
            if outer.level > inner.level:
                raise ClusterError(
                    f"Mesh axes go from the outermost level in, but {outer.name} (level "
                    f"{outer.level}) stands before {inner.name} (level {inner.level})."
                )

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.shape)

    @property
    def names(self) -> tuple[str, ...]:
        """The axes' names, outermost first."""
        return tuple(axis.name for axis in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The axes' sizes, outermost first."""
        return tuple(axis.size for axis in self.axes)

    def __str__(self) -> str:
        return "x".join(map(str, self.shape)) or "1"


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
