"""The processes that the jobs of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .ranks import Launch, Ranks


@pytest.fixture(scope="session")
def on_ranks(captures_folder: Path) -> Iterator[Launch]:
    """Call `job(rank, *args)` on some processes: `on_ranks(job, processes, *args)`."""
    ranks = Ranks(captures_folder)
    yield ranks.run
    ranks.stop()
