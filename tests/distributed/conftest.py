"""The processes that the jobs of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from .ranks import Launch, Ranks, start_server


@pytest.fixture(autouse=True, scope="session")
def _server() -> None:
    """Whoever starts processes first, they are forked from the same one."""
    if settings.get_current_profile_name() != "quick":
        start_server()


@pytest.fixture(scope="session")
def on_ranks(captures_folder: Path) -> Iterator[Launch]:
    """Call `job(rank, *args)` on some processes: `on_ranks(job, processes, *args)`."""
    ranks = Ranks(captures_folder)
    yield ranks.run
    ranks.stop()
