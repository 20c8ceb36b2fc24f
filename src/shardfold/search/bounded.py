"""Placeholder."""

from __future__ import annotations

from shardfold.search.factors import Factors
from shardfold.search.kinds import Ints
from shardfold.search.watch import Watch


def bounded(factors: Factors, *, table_bytes: float, watch: Watch) -> tuple[Ints, float | None]:
    """Soon."""
    raise NotImplementedError
