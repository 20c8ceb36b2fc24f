"""docs/results/cluster.md, from the measured figures alone."""

from __future__ import annotations

from typing import Any


def write_page(entries: list[dict[str, Any]]) -> None:
    """Write the page."""
