"""What the parts of the papers' page share: the published figures, tables, and times in words."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

PUBLISHED = tomllib.loads(Path(__file__).with_name("published.toml").read_text())
NAMES = {
    "alexnet": "AlexNet",
    "inceptionv3": "InceptionV3",
    "rnnlm": "RNNLM",
    "transformer": "Transformer",
}


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column to the left, the others to the right."""
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *body))


def took(seconds: float | None) -> str:
    """A time in three figures.

    >>> took(0.000451), took(12.0), took(2237.0), took(7200.0), took(None)
    ('0.451 ms', '12 s', '37.3 min', '2 h', '-')
    """
    if seconds is None:
        return "-"
    if seconds >= 3600:
        return f"{seconds / 3600:.3g} h"
    if seconds >= 600:
        return f"{seconds / 60:.3g} min"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
