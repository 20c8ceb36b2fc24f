"""`shardfold train` says where it is: often enough to follow, seldom enough to read."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shardfold.cli.run import _shown
from shardfold.runtime.training import StepReport


def lines(capsys, steps: int, seconds: float, rank: int = 0) -> list[int]:
    """The steps that are shown where each takes so many seconds."""
    now = [0.0]
    show = _shown(rank, steps, lambda: now[0])
    for number in range(steps):
        now[0] += seconds
        show(StepReport(number, 1.0, seconds))
    return [int(line.split()[1]) for line in capsys.readouterr().err.splitlines()]


@pytest.mark.parametrize(
    ("steps", "seconds", "least", "most"),
    [(5_000, 0.001, 20, 40), (5_000, 1.0, 500, 530), (1_000_000, 0.0001, 20, 50), (3, 9.0, 3, 3)],
)
def test_lines_come_at_a_sensible_rate(
    capsys, steps: int, seconds: float, least: int, most: int
) -> None:
    shown = lines(capsys, steps, seconds)
    assert least <= len(shown) <= most
    assert (shown[0], shown[-1]) == (0, steps - 1)
    gaps = [b - a for a, b in pairwise(shown)]
    assert max(gaps) <= max(1, steps // 20)
    assert seconds > 5 or max(gaps) * seconds <= 10.0 + seconds


def test_other_ranks_are_silent(capsys) -> None:
    assert lines(capsys, 30, 1.0, rank=1) == []
