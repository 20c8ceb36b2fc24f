"""Here every model is captured anew: capture is what is tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from captures import captured_anew


@pytest.fixture(autouse=True)
def _captured_anew() -> Iterator[None]:
    with captured_anew():
        yield
