from __future__ import annotations

import pytest

from shardfold.report.units import number, seconds, size


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0 s"),
        (1.5, "1.50 s"),
        (0.9999, "1.00 s"),
        (0.25, "250 ms"),
        (3e-9, "3.00 ns"),
        (71, "71.0 s"),
        (0.00973, "9.73 ms"),
        (1234, "1,234 s"),
    ],
)
def test_seconds(value: float, words: str) -> None:
    assert seconds(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (513 * 2**10, "513 KiB"), (2**40, "1.0 TiB")],
)
def test_size(value: float, words: str) -> None:
    assert size(value) == words


@pytest.mark.parametrize(
    ("value", "words"), [(999, "999"), (62_378_344, "62.4M"), (405_853_388_800, "406B")]
)
def test_number(value: float, words: str) -> None:
    assert number(value) == words
