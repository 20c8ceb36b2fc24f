"""A model and a cluster for tests of pipelines, and the plan that they have."""

from __future__ import annotations

import pytest

from shardfold.api import Planner
from shardfold.plans import Plan

from .test_staged import planner

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


@pytest.fixture(scope="session")
def stack() -> Planner:
    return planner(layers=6, tied=True)


@pytest.fixture(scope="session")
def piped(stack: Planner, slow: str) -> Plan:
    return stack.plan(cluster=slow, micro_batches=8)
