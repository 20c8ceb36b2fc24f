"""docs/results/faults.md, from the measured figures alone."""

from __future__ import annotations

from typing import Any


def write_page(results: dict[str, Any]) -> None:
    """Write the page."""
