"""A plan shows itself in a notebook, and a model's names stay texts there."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import msgspec
import pytest

import shardfold as sf
from shardfold.report.summary_text import contenders
from virtual.models import Language, tokens


@pytest.fixture(scope="module")
def plan() -> sf.Plan:
    return sf.plan(Language(), (tokens(),), {"labels": tokens()}, cluster="2x2xa100")


def test_it_is_well_formed_and_has_the_totals(plan: sf.Plan) -> None:
    text = plan._repr_html_()
    root = ElementTree.fromstring(text.replace("<br>", "<br/>"))
    words = " ".join(root.itertext())
    for rival in contenders(plan):
        assert all(cell in words for cell in rival.words)


def test_names_are_escaped(plan: sf.Plan) -> None:
    operators = tuple(
        msgspec.structs.replace(entry, module="<script>alert(1)</script>")
        for entry in plan.operators
    )
    text = msgspec.structs.replace(plan, operators=operators)._repr_html_()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
