"""Clusters for tests of pipelines."""

from __future__ import annotations

import pytest

SLOW = """
name = "slow"
device = "a100"

[[levels]]
name = "node"
size = 2
bandwidth = 25e6
latency_seconds = 30e-6

[[levels]]
name = "gpu"
size = 2
bandwidth = 230e9
latency_seconds = 2e-6
"""


@pytest.fixture(scope="session")
def slow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cluster whose nodes have little between them."""
    file = tmp_path_factory.mktemp("cluster") / "slow.toml"
    file.write_text(SLOW)
    return str(file)
