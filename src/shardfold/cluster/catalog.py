"""Known hardware: one data file per device in `hardware/`, each figure with its source."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from shardfold.cluster.cluster import Cluster
from shardfold.cluster.device import Device
from shardfold.cluster.level import LARGEST_SIZE
from shardfold.cluster.tables import HardwareTable, LinkTable, build_levels, convert
from shardfold.errors import ClusterError, nearest


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device, the links it usually comes with (outermost first), and its nodes' capacity."""

    name: str
    aliases: tuple[str, ...]
    device: Device
    links: tuple[LinkTable, ...]
    node_size: int

    def cluster(self, sizes: Sequence[int]) -> Cluster:
        """The cluster of `sizes`, outermost first: `(4, 8)` is four nodes of eight."""
        text = "".join(f"{size}x" for size in sizes) + self.name
        self._check(text, sizes)
        absent = len(self.links) - len(sizes)
        levels = build_levels(self.links, [1] * absent + list(sizes))
        return Cluster(self._canonical_name(sizes), self.device, levels)

    def _canonical_name(self, sizes: Sequence[int]) -> str:
        # Only leading ones say nothing: 4x1xh100 is four nodes, 4xh100 four devices of one.
        kept = list(sizes)
        while len(kept) > 1 and kept[0] == 1:
            kept.pop(0)
        return "".join(f"{size}x" for size in kept or [1]) + self.name

    def _check(self, text: str, sizes: Sequence[int]) -> None:
        known = [link.name for link in self.links]
        if len(sizes) > len(known):
            raise ClusterError(
                f"Cluster {text!r} has {len(sizes)} levels, but {self.name} gives figures for "
                f"{len(known)} ({', '.join(known)}). Describe more levels in a cluster file."
            )
        for size in sizes:
            if not 1 <= size <= LARGEST_SIZE:
                raise ClusterError(
                    f"Cluster {text!r}: sizes go from 1 to {LARGEST_SIZE:,}, got {size:,}."
                )
        if sizes and sizes[-1] > self.node_size:
            raise ClusterError(
                f"Cluster {text!r}: a node of {self.name} holds at most {self.node_size} devices, "
                f"got {sizes[-1]}. Try {self._suggestion(sizes)}, or describe the node in a "
                f"cluster file."
            )

    def _suggestion(self, sizes: Sequence[int]) -> str:
        """The same number of devices in nodes as full as they divide."""
        *outer, devices = sizes
        fits = max(n for n in range(1, self.node_size + 1) if devices % n == 0)
        nodes = devices // fits * (outer.pop() if outer else 1)
        return "".join(f"{size}x" for size in (*outer, nodes, fits)) + self.name


@cache
def catalog() -> tuple[Hardware, ...]:
    """All known hardware, by name."""
    folder = resources.files("shardfold.cluster") / "hardware"
    files = [file for file in folder.iterdir() if file.name.endswith(".toml")]
    tables = [convert(tomllib.loads(file.read_text("utf-8")), HardwareTable) for file in files]
    return tuple(sorted(map(_hardware, tables), key=lambda hardware: hardware.name))


def hardware_names() -> tuple[str, ...]:
    """Every name that `find_hardware` knows, aliases included."""
    return tuple(sorted(_by_name()))


def find_hardware(name: str) -> Hardware:
    """The hardware of that name or alias."""
    try:
        return _by_name()[name.lower()]
    except KeyError:
        raise ClusterError(
            f"Unknown hardware {name!r}. {nearest(name.lower(), hardware_names())}"
        ) from None


@cache
def _by_name() -> dict[str, Hardware]:
    return {name: hardware for hardware in catalog() for name in (hardware.name, *hardware.aliases)}


def _hardware(table: HardwareTable) -> Hardware:
    return Hardware(
        name=table.name,
        aliases=tuple(table.aliases),
        device=table.device.build(),
        links=tuple(table.levels),
        node_size=table.node_size,
    )
