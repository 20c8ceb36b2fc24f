"""One level of links: how many groups it joins, how fast, and who says so."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from shardfold.errors import ClusterError

LARGEST_SIZE = 1_000_000
"""No level is wider than this; larger numbers are typing errors."""


@dataclass(frozen=True, slots=True)
class Level:
    """The links among the `size` members of one group, a member being a `name`.

    `Level("node", 4, ...)` joins four nodes; `Level("gpu", 8, ...)` joins the eight devices of a
    node. `bandwidth` is what large messages reach, in bytes/s per device and direction *while
    every device of the group communicates*: an adapter that eight devices share counts for an
    eighth. `latency_seconds` is the cost of one step of a collective, whatever its size.
    `rated_bandwidth` is the link's nominal figure on the same terms, where it is known.
    """

    name: str
    size: int
    bandwidth: float
    latency_seconds: float
    source: str
    rated_bandwidth: float | None = None

    def __post_init__(self) -> None:
        # Axis names are level names with a digit appended, so a level's own ends in none.
        if not re.fullmatch(r"[a-z](?:[a-z_]*[a-z])?", self.name):
            raise ClusterError(
                f"Level name {self.name!r} must be lower-case letters, such as node, gpu or rack."
            )
        if not 1 <= self.size <= LARGEST_SIZE:
            raise ClusterError(
                f"Level {self.name}: size must be from 1 to {LARGEST_SIZE:,}, got {self.size:,}."
            )
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise ClusterError(
                f"Level {self.name}: bandwidth must be finite and positive, "
                f"got {self.bandwidth:g} bytes/s."
            )
        if not (math.isfinite(self.latency_seconds) and self.latency_seconds >= 0):
            raise ClusterError(
                f"Level {self.name}: latency_seconds must be finite and not negative, "
                f"got {self.latency_seconds:g}."
            )
        self._check_rated()

    def _check_rated(self) -> None:
        rated = self.rated_bandwidth
        if rated is not None and not (math.isfinite(rated) and rated >= self.bandwidth):
            raise ClusterError(
                f"Level {self.name}: bandwidth is what large messages reach and cannot exceed "
                f"rated_bandwidth, got {self.bandwidth:g} and {rated:g} bytes/s."
            )
