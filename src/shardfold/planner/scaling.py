"""One model on ever more nodes: its step, its rate, how much of the devices' rate is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardfold.cluster import Cluster
from shardfold.cluster.catalog import find_hardware, hardware_names
from shardfold.cluster.parse import parse
from shardfold.errors import ClusterError, InputError


@dataclass(frozen=True, slots=True)
class ScaleRow:
    """The figures on so many nodes; without a step, `reason` says why there is none."""

    nodes: int
    devices: int
    how: str = ""  # the mesh, or the strategy of a stack
    step_seconds: float | None = None
    rate: float | None = None  # tokens or samples in a second
    unit: str = ""
    peak_bytes: float | None = None
    reason: str = ""

    @property
    def rate_per_device(self) -> float | None:
        """Tokens or samples in a second, of one device."""
        return None if self.rate is None else self.rate / self.devices


@dataclass(frozen=True, slots=True)
class Scaling:
    """Rows in the order of nodes, and what an hour of a device costs, where that is known."""

    cluster: str
    rows: tuple[ScaleRow, ...]
    price: float | None = None

    def priced_at(self, price: float | None) -> Scaling:
        """The same with the price of an hour of a device."""
        return replace(self, price=price)

    def efficiency(self, row: ScaleRow) -> float | None:
        """A device's rate, over its rate in the first row that has one."""
        first = next((r.rate_per_device for r in self.rows if r.rate_per_device), None)
        own = row.rate_per_device
        return None if first is None or own is None else own / first

    def cost_per_hour(self, row: ScaleRow) -> float | None:
        """Of all devices."""
        return None if self.price is None else self.price * row.devices

    def cost_per_billion(self, row: ScaleRow) -> float | None:
        """Of a billion tokens or samples."""
        hour = self.cost_per_hour(row)
        return None if hour is None or not row.rate else hour / (row.rate * 3600) * 1e9

    def as_plain(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "cluster": self.cluster,
            "price_per_device_hour": self.price,
            "rows": [
                {
                    **asdict(row),
                    "efficiency": self.efficiency(row),
                    "cost_per_hour": self.cost_per_hour(row),
                    "cost_per_billion": self.cost_per_billion(row),
                }
                for row in self.rows
            ],
        }


def of_nodes(text: str, counts: Sequence[int]) -> list[Cluster]:
    """Clusters of so many nodes: of known hardware (`h100`: full nodes; `4xh100`), or of a file.

    >>> [cluster.name for cluster in of_nodes("h100", (1, 2))]
    ['8xh100', '2x8xh100']
    """
    if not counts or any(count < 1 for count in counts):
        raise InputError(f"Numbers of nodes are whole and positive, such as 1,2,4; got {counts}.")
    name = text.strip().lower()
    if name in hardware_names():
        own = find_hardware(name)
        return [own.cluster([n, own.node_size] if len(own.links) > 1 else [n]) for n in counts]
    return [_with_nodes(parse(text), count) for count in counts]


def _with_nodes(cluster: Cluster, count: int) -> Cluster:
    """The cluster with so many members of its outermost level but the innermost."""
    if len(cluster.levels) < 2:
        size = cluster.size
        known = next((n for n in hardware_names() if cluster.name == f"{size}x{n}"), None)
        if known is None:
            raise ClusterError(
                f"Cluster {cluster.name} has one level of links: name hardware such as h100, or "
                "describe the links between nodes in a cluster file."
            )
        return find_hardware(known).cluster([count, size])
    outer = replace(cluster.levels[0], size=count)
    inner = cluster.levels[-1]
    name = f"{count} of {cluster.name}"
    return Cluster(name, cluster.device, (outer, inner))
