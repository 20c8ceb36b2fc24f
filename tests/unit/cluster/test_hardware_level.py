from __future__ import annotations

import pytest

from shardfold.cluster import Level
from shardfold.errors import ClusterError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("Node", 2, 1e9, 1e-6, ""), "'Node' must be lower-case letters"),
        (("gpu0", 2, 1e9, 1e-6, ""), "'gpu0' must be lower-case letters"),
        (("node", 0, 1e9, 1e-6, ""), "Level node: size must be from 1 to 1,000,000, got 0"),
        (("node", 10**7, 1e9, 1e-6, ""), "got 10,000,000"),
        (("node", 2, 0.0, 1e-6, ""), "bandwidth must be finite and positive, got 0"),
        (("node", 2, float("inf"), 1e-6, ""), "bandwidth must be finite"),
        (("node", 2, 1e9, -1.0, ""), "latency_seconds must be finite and not negative, got -1"),
        (("node", 2, 2e9, 1e-6, "", 1e9), r"cannot exceed rated_bandwidth, got 2e\+09 and 1e\+09"),
    ],
)
def test_a_wrong_figure_is_named(fields: tuple[object, ...], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Level(*fields)  # type: ignore[arg-type]
