"""The shape of cluster and hardware files: which keys they have, and the values they become.

Names, types and units are checked here: a figure in GB or microseconds, where bytes or seconds
are meant, is refused. All else is checked by `Device`, `Level` and `Cluster` themselves, so that a
value made in code meets the same rules as one read from a file.

Known hardware: one data file per device in `hardware/`, each figure with its source.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, TypeVar

import msgspec

from shardfold.cluster.cluster import Cluster
from shardfold.cluster.hardware import LARGEST_SIZE, Device, Level
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
    units: int | None = None
    clock_hz: float = 0.0
    attention_efficiency: tuple[float, float] = (0.0, 0.0)
    workspace_bytes: int = 0
    grouped_products: bool = False
    host_pace: float = 1.0

    def build(self) -> Device:
        """The device that the table describes."""
        where = f"Device {self.name}: "
        _check_unit(f"{where}memory_bytes", self.memory_bytes, "bytes", "80e9 for 80 GB")
        _check_unit(
            f"{where}memory_bandwidth", self.memory_bandwidth, "bytes/s", "900e9 for 900 GB/s"
        )
        for dtype, flops in self.peak_flops.items():
            _check_unit(f"{where}peak_flops.{dtype}", flops, "FLOP/s", "312e12 for 312 TFLOP/s")
        _check_seconds(f"{where}launch_seconds", self.launch_seconds)
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
SMALLEST = 1e6  # bytes, bytes/s or FLOP/s: no device or link has less, but a figure in GB is less
LONGEST = 1.0  # seconds of a launch or of a message's start: a figure in microseconds is more


def convert(plain: Any, kind: type[T]) -> T:
    """Read plain TOML or JSON values as a table; the error names every field that is wrong."""
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        message = _several_devices(plain) or _missing(plain, kind) or _in_words(str(error), kind)
        raise ClusterError(message) from None


def _several_devices(plain: Any) -> str:
    if not isinstance(plain, dict):
        return ""
    levels = plain.get("levels")
    owners = [each for each in levels if isinstance(each, dict)] if isinstance(levels, list) else []
    if isinstance(plain.get("device"), list):
        return f"device is a list, but {ONE_KIND}"
    if any("device" in each for each in owners):
        return f"a level has a device of its own, but {ONE_KIND}"
    return ""


ONE_KIND = (
    "a cluster is of one kind of device: describe one. For several, plan for each in a file of its "
    "own."
)


def _missing(plain: Any, kind: type[ClusterTable | HardwareTable]) -> str:
    """All required fields that a file lacks, by table; nothing where another thing is wrong."""
    if not isinstance(plain, dict):
        return ""
    levels = plain.get("levels")
    level = LevelTable if kind is ClusterTable else LinkTable
    tables: list[tuple[str, Any, type[msgspec.Struct]]] = [("", plain, kind)]
    tables.append(("device", plain.get("device"), DeviceTable))
    if isinstance(levels, list):
        tables.extend((f"levels[{n}]", table, level) for n, table in enumerate(levels))
    lines = []
    for where, table, shape in tables:
        absent = _absent(table, shape) if isinstance(table, dict) else []
        if absent:
            names = ", ".join(f"`{name}`" for name in absent)
            lines.append(
                f"{where + ': ' if where else ''}Object missing required "
                f"field{'s' * (len(absent) > 1)} {names}"
            )
    advice = f" {LIKE}" if any(line.startswith("device") for line in lines) else ""
    return f"{'; '.join(lines)}.{advice}" if lines else ""


LIKE = 'Where only some figures differ from known hardware, write like = "8xl40s", and only those.'


def _absent(table: dict[str, Any], shape: type[msgspec.Struct]) -> list[str]:
    """The required fields that are not there, unless one that is not known stands for them."""
    fields = msgspec.structs.fields(shape)
    if table.keys() - {field.name for field in fields}:
        return []
    return [field.name for field in fields if field.required and field.name not in table]


def _check_unit(what: str, value: float, unit: str, example: str) -> None:
    """Refuse a figure that is too small to be in base units; others are checked elsewhere."""
    if 0 < value < SMALLEST:
        raise ClusterError(f"{what} is in {unit}, got {value:g}: write {example}.")


def _check_seconds(what: str, value: float) -> None:
    if value > LONGEST:
        raise ClusterError(f"{what} is in seconds, got {value:g}: write 2e-6 for 2 microseconds.")


def build_levels(links: Sequence[LinkTable], sizes: Sequence[int]) -> tuple[Level, ...]:
    """Levels of the given sizes, each link's bandwidth divided among the devices that share it."""
    levels: list[Level] = []
    for index, (link, size) in enumerate(zip(links, sizes, strict=True)):
        where, example = f"Level {link.name}: ", "300e9 for 300 GB/s, 12.5e9 for 100 Gbit/s"
        _check_unit(f"{where}bandwidth", link.bandwidth, "bytes/s", example)
        _check_unit(f"{where}rated_bandwidth", link.rated_bandwidth or 0.0, "bytes/s", example)
        _check_seconds(f"{where}latency_seconds", link.latency_seconds)
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


def _in_words(message: str, kind: type[ClusterTable | HardwareTable]) -> str:
    """A validation message with the field's path in front and near names behind.

    >>> _in_words("Expected `float`, got `str` - at `$.device.memory_bandwidth`", ClusterTable)
    'device.memory_bandwidth: Expected `float`, got `str`.'
    """
    what, _, path = message.partition(" - at `$")
    where = path.strip(".`")
    advice = ""
    if "unknown field" in what:
        advice = " " + _where_it_goes(what.split("`")[1], where, kind)
    return f"{where + ': ' if where else ''}{what}.{advice}"


def _where_it_goes(key: str, where: str, kind: type[ClusterTable | HardwareTable]) -> str:
    """The table that has the field, or the nearest names in the one where it was found."""
    level = LevelTable if kind is ClusterTable else LinkTable
    tables = {"device": DeviceTable, "levels": level, "": kind}
    own = tables[where.partition("[")[0].partition(".")[0]]
    for name, table in tables.items():
        if table is not own and name and key in table.__struct_fields__:
            return f"It goes into {'[device]' if name == 'device' else '[[levels]]'}."
    advice = nearest(key, own.__struct_fields__)
    if own is ClusterTable:
        advice += f" Of a level of links called {key}, write [[levels]] and name = {key!r}."
    return advice


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
