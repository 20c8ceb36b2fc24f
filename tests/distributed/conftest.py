"""The processes that the jobs of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .ranks import Launch, Ranks


@pytest.fixture(scope="session")
def on_ranks() -> Iterator[Launch]:
    """Call `job(rank, *args)` on some processes: `on_ranks(job, processes, *args)`."""
    ranks = Ranks()
    yield ranks.run
    ranks.stop()
