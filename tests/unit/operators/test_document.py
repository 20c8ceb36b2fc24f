"""The reference page says what the table says."""

from __future__ import annotations

from shardfold.operators import REGISTRY

from .document import FAMILIES, PAGE, page
from .test_rules import CASES


def test_the_page_of_operators_is_the_table() -> None:
    assert PAGE.read_text() == page(CASES), "write it again: python -m operators.document"


def test_every_family_is_on_the_page() -> None:
    shown = {kind for family in FAMILIES.values() for kind in family.TABLE}
    described = {kind for kind, operator in REGISTRY.items() if operator.rule is not None}
    assert described - shown == {"shardfold.write"}  # which capture makes
