"""One plan for all unit tests."""

from __future__ import annotations

import pytest

import shardfold as sf
from shardfold.capture import capture
from shardfold.graph import Graph
from virtual.models import Language, tokens


@pytest.fixture(scope="session")
def plan() -> sf.Plan:
    # By kernels, the host of so small a model would decide.
    asked = {"cluster": "4xa100", "cost": "roofline"}
    return sf.plan(Language(), (tokens(),), {"labels": tokens()}, **asked)


@pytest.fixture(scope="session")
def graph() -> Graph:
    return capture(Language(), (tokens(),), {"labels": tokens()})
