from __future__ import annotations

import io

import pytest
from rich.console import Console

from shardfold.plans import Plan
from shardfold.report import plan_view

from ..plans.made import made


def drawn(plan: Plan, width: int = 80, **options: object) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, highlight=False)
    console.print(plan_view(plan, width=width, **options))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


@pytest.mark.parametrize("width", [80, 100])
def test_the_table_fits_its_width(width: int) -> None:
    assert max(map(len, drawn(made(), width).splitlines())) <= width


def test_the_table_shows_blocks_splits_collectives_and_shares() -> None:
    text = drawn(made(), model="mine.py:make")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "mine.py:make on 4x8xh100, mesh node=4 x gpu0=2 x gpu1=4"
    assert "layers.* (2 times) 30.0%" in lines
    assert "attention.query, key linear batch/4 heads/8 bwd reduce node 4.0 MiB 20.0%" in lines
    assert "head linear batch/4 vocab/8 fwd gather all 8.0 MiB 69.8%" in lines
    assert "data parallel 2.50 s 2.50x 90.0 GiB DOES NOT FIT" in lines
    assert "Meshes tried: 4x2x4 is best; 2x2x8 +25.0%." in lines


def test_everything_is_shown_on_demand() -> None:
    assert "small operators" in drawn(made())
    assert "small operators" not in drawn(made(), everything=True)
    assert "bwd reduce node 1.0 KiB" in drawn(made(), everything=True)


def test_what_does_not_fit_is_said() -> None:
    assert "the smallest plan needs 55.0 GiB" in drawn(made(fits=False))
