"""The page that says where things are, and where new ones go, names what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardfold.cluster.hardware import DTYPES as RATED
from shardfold.graph.graph import ITEM_BYTES
from shardfold.graph.precision import PRECISIONS
from shardfold.runtime.checkpoint.index import DTYPES as SAVED

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src" / "shardfold"
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
ROWS = [
    line
    for line in PAGE.partition("## Where does it go?")[2].splitlines()
    if line.startswith("| ") and "you want to add" not in line
]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_every_file_that_the_page_names_is_there() -> None:
    known = {str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.py")}
    ends = {"/".join(path.split("/")[k:]) for path in known for k in range(path.count("/") + 1)}
    named = {name for name in quoted(PAGE) if re.fullmatch(r"(?!docs/)[a-z_/]+\.py", name)}
    assert len(named) > 40
    assert sorted(named - ends) == []


def test_every_package_has_a_line() -> None:
    packages = {path.parent.name for path in SOURCES.glob("*/__init__.py")}
    table = PAGE.partition("| package |")[2].partition("##")[0]
    assert packages == {name for name in quoted(table) if name in packages}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_what_a_newcomer_looks_for_is_where_the_page_says(row: str) -> None:
    """Every name of a row is defined in one of its files or folders."""
    names = quoted(row)
    places = [SOURCES / name for name in names if (SOURCES / name).exists()]
    assert places, row
    files = [f for p in places for f in (p.glob("*.py") if p.is_dir() else [p])]
    text = "\n".join(file.read_text() for file in files)
    for name in names:
        if re.fullmatch(r"[A-Z][A-Za-z_]+", name):
            assert re.search(rf"^\s*(class )?{name}\b", text, re.MULTILINE), f"{name}: {row}"


def test_every_precision_can_be_priced_and_saved() -> None:
    for precision in PRECISIONS.values():
        for dtype in filter(None, (precision.computes, precision.master, precision.reduces)):
            assert dtype in RATED
            assert SAVED[dtype][1] == ITEM_BYTES[dtype]
