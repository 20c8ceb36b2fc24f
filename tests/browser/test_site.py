"""The documentation's site: its pages open, its search finds, and it fetches nothing from afar."""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("index", "tutorial", "how-to/launch", "explanation/sharding", "reference/python")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def address(browser, tmp_path_factory) -> Iterator[str]:
    pytest.importorskip("mkdocs", reason="the documentation's packages are missing")
    site = tmp_path_factory.mktemp("site")
    # Without --quiet, under which warnings do not count; that none is left, `make docs` sees to.
    words = [sys.executable, "-m", "mkdocs", "build", "--site-dir", site]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(words, check=True, cwd=ROOT, env=quiet, capture_output=True)
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_pages_open_and_fetch_nothing_from_afar(address: str, browser) -> None:
    asked: list[str] = []
    complaints: list[str] = []
    page = browser.new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    for name in PAGES:
        page.goto(f"{address}/{name}.html")
        assert page.locator("h1").inner_text().strip()
        broken = page.evaluate("[...document.images].filter((i) => !i.naturalWidth).length")
        assert broken == 0
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []
    assert complaints == []
    page.close()


def test_the_search_box_finds_a_page(address: str, browser) -> None:
    page = browser.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("requestfailed", lambda request: said.append(f"{request.url}: {request.failure}"))
    found = page.locator(".md-search-result__link")
    for _ in range(6):  # what is typed before the index has loaded is lost
        page.goto(f"{address}/index.html")
        for _ in range(10):
            page.fill(".md-search__input", "")
            page.fill(".md-search__input", "folding")
            page.wait_for_timeout(1_000)
            if found.count():
                break
        if found.count():
            break
    assert "folding" in " ".join(found.all_text_contents()).lower(), said
    page.close()
