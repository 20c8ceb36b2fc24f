"""The pictures of the explanation pages are what the library's values give today."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "drawings"
STABLE = ("sharding", "clusters", "folding", "capture", "architecture")


def drawings():
    spec = importlib.util.spec_from_file_location("draw", FOLDER / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.DRAWINGS


@pytest.mark.parametrize("name", STABLE)
def test_a_drawing_is_up_to_date(name: str) -> None:
    kept = (FOLDER / f"{name}.svg").read_text()
    assert drawings()[name]() == kept, f"python docs/drawings/draw.py {name} draws it anew"


def test_the_curves_are_those_of_the_cost_model() -> None:
    ElementTree.fromstring(drawings()["costs"]())


def test_every_drawing_is_shown_somewhere() -> None:
    pages = " ".join(page.read_text() for page in FOLDER.parent.rglob("*.md"))
    for name in drawings():
        ElementTree.parse(FOLDER / f"{name}.svg")
        assert f"drawings/{name}.svg" in pages
