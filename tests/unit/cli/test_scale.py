"""`shardfold scale` prints a table, draws a figure, and refuses what is no number of nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def test_json_and_a_figure(run, tmp_path: Path) -> None:
    path = tmp_path / "scale.svg"
    asked = ("scale", "gpt2-tiny", "--cluster", "2xa100", "--nodes", "1,2", "--batch", "8")
    result = run(*asked, "--price", "1.5", "--save", path, "--json")
    assert result.exit_code == 0, result.output
    plain = json.loads(result.stdout)
    assert [row["devices"] for row in plain["rows"]] == [2, 4]
    assert plain["rows"][1]["cost_per_hour"] == 6.0
    assert path.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--nodes", "1,two"), "is no list of numbers"),
        (("--save", "x.png"), "must end in .svg or .html"),
        (("--for", "megatrn"), "Did you mean megatron"),
        (("--nodes", "0"), "whole and positive"),
    ],
)
def test_bad_words(refused, words: tuple[str, ...], says: str) -> None:
    assert says in refused("scale", "gpt2-tiny", "--cluster", "h100", *words)
