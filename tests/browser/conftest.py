"""A headless Chromium for the tests of this folder; without one they are skipped, and say so."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium on the path: apt-get install chromium runs the browser tests")
    api = pytest.importorskip("playwright.sync_api", reason="the package playwright is missing")
    with api.sync_playwright() as play:
        # Tests may run as root in a container, where Chromium's own sandbox cannot start.
        made = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def opened(browser, tmp_path: Path) -> Iterator[Callable[..., object]]:
    """Open a page from a file; whatever the console complains of, or is fetched, fails the test."""
    complaints: list[str] = []
    contexts = []

    def opener(html: str, **options: object) -> object:
        file = tmp_path / "report.html"
        file.write_text(html, encoding="utf-8")
        context = browser.new_context(viewport={"width": 1366, "height": 820}, **options)
        contexts.append(context)
        context.set_default_timeout(60_000)  # the machine may be busy
        page = context.new_page()
        page.on("console", lambda said: complaints.append(f"{said.type}: {said.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda asked: (
                asked.url.startswith(("file:", "data:")) or complaints.append(f"asked {asked.url}")
            ),
        )
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready]", timeout=60_000)
        return page

    yield opener
    for context in contexts:
        context.close()
    assert complaints == []
