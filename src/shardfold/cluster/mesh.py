"""A mesh: the devices of a cluster as a grid with named axes, apart from any real device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

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
