"""The shape of cluster and hardware files: which keys they have, and the values they become.

Only names and types are checked here; figures are checked by `Device`, `Level` and `Cluster`
themselves, so that a value made in code meets the same rules as one read from a file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from shardfold.cluster.device import Device
from shardfold.cluster.level import Level
from shardfold.errors import ClusterError, nearest


class DeviceTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[device]`: see `Device` for the meaning of each key."""

    name: str
    memory_bytes: int | float  # 24e9 is a natural way to write it
    memory_bandwidth: float
    peak_flops: dict[str, float]
    matmul_efficiency: float
    memory_efficiency: float
    launch_seconds: float
    source: str = ""

    def build(self) -> Device:
        """The device that the table describes."""
        fields = msgspec.structs.asdict(self)
        if math.isfinite(self.memory_bytes):
            fields["memory_bytes"] = int(self.memory_bytes)
        fields["peak_flops"] = tuple(self.peak_flops.items())
        return Device(**fields)


class LinkTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[[levels]]` of a hardware file: links whose number of members is not fixed yet.

    `bandwidth` is that of one link; `shared_by` says how many of a member's devices use one
    link together (all eight devices of a node with one adapter: 8).
    """

    name: str
    bandwidth: float
    latency_seconds: float
    source: str = ""
    rated_bandwidth: float | None = None
    shared_by: int = 1


class LevelTable(LinkTable, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[[levels]]` of a cluster file: links, and how many members one group has."""

    size: int


class ClusterTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cluster file: a device (a table, or the name of known hardware) and levels of links."""

    device: DeviceTable | str
    levels: list[LevelTable]
    name: str = ""


class HardwareTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A hardware file: a device, the links it comes with, and how many devices a node holds."""

    name: str
    node_size: int
    device: DeviceTable
    levels: list[LinkTable]
    aliases: list[str] = []


T = TypeVar("T", ClusterTable, HardwareTable)


def convert(plain: Any, kind: type[T]) -> T:
    """Read plain TOML or JSON values as a table; the error names the field that is wrong."""
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise ClusterError(_in_words(str(error))) from None


def build_levels(links: Sequence[LinkTable], sizes: Sequence[int]) -> tuple[Level, ...]:
    """Levels of the given sizes, each link's bandwidth divided among the devices that share it."""
    levels: list[Level] = []
    for index, (link, size) in enumerate(zip(links, sizes, strict=True)):
        sharers = _sharers(link, sizes[index + 1 :])
        rated = None if link.rated_bandwidth is None else link.rated_bandwidth / sharers
        bandwidth = link.bandwidth / sharers
        levels.append(Level(link.name, size, bandwidth, link.latency_seconds, link.source, rated))
    return tuple(levels)


def _sharers(link: LinkTable, inner_sizes: Sequence[int]) -> int:
    """How many devices use one link at once: no more than a member has."""
    if link.shared_by < 1:
        raise ClusterError(
            f"Level {link.name}: shared_by must be at least 1, got {link.shared_by}."
        )
    if link.shared_by > 1 and not inner_sizes:
        raise ClusterError(
            f"Level {link.name}: shared_by is {link.shared_by}, but the members of the innermost "
            f"level are single devices. Give the bandwidth that one device gets while all "
            f"communicate."
        )
    return max(1, min(link.shared_by, math.prod(inner_sizes)))


def _in_words(message: str) -> str:
    """A validation message with the field's path in front and near names behind.

    >>> _in_words("Expected `float`, got `str` - at `$.device.memory_bandwidth`")
    'device.memory_bandwidth: Expected `float`, got `str`.'
    """
    what, _, path = message.partition(" - at `$")
    where = path.strip(".`")
    advice = ""
    if "unknown field" in what:
        advice = " " + nearest(what.split("`")[1], _KEYS)
    return f"{where + ': ' if where else ''}{what}.{advice}"


_KEYS = {
    field
    for table in (DeviceTable, LevelTable, ClusterTable, HardwareTable)
    for field in table.__struct_fields__
}
