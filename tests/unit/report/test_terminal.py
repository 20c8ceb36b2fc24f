from __future__ import annotations

import io

from rich.console import Console

from shardfold.progress import Stage
from shardfold.report import drawn


def test_stages_are_drawn_and_leave_no_line_behind() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, legacy_windows=False)
    with drawn(console) as watch:
        watch(Stage("capture", 0, 1))
        watch(Stage("search", 1, 3))
        watch(Stage("something new", 0, 1))
    text = stream.getvalue()
    assert "building the model" in text or "something new" in text
    assert not console.file.getvalue().endswith("\n")


def test_nothing_is_drawn_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with drawn(Console(file=stream)) as watch:
        watch(Stage("capture", 0, 1))
    assert stream.getvalue() == ""
