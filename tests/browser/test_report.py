"""Reports of real models, opened, clicked and searched in a browser."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold import zoo
from shardfold.report.html import to_html

# Where screenshots are kept: SHARDFOLD_SCREENSHOTS=docs/report pytest tests/browser
KEPT = os.environ.get("SHARDFOLD_SCREENSHOTS")
MODELS = {
    "alexnet": ("4x8x1080ti", "fc6", {}),
    "inceptionv3": ("4x8x1080ti", "conv2d batch", {}),
    "transformer": ("4x8x1080ti", "feedforward up", {}),
    "llama3-405b": ("16x8xh100", "q_proj", {"dtype": "bf16", "mesh": "16x8"}),
    "mixtral-8x7b": ("16x8xh100", "experts", {"dtype": "bf16", "mesh": "16x8"}),
}
PANELS = ("rivals", "time", "graph", "inspector", "timeline", "memory", "mesh", "operators", "made")
FASTEST = 2.0  # seconds in which the largest report must stand


def planned(name: str) -> sf.Plan:
    cluster, _, options = MODELS[name]
    model, args, kwargs = zoo.build(name)
    return sf.plan(model, args, kwargs, cluster=cluster, **options)


@pytest.mark.parametrize("name", MODELS)
def test_a_report_opens_and_answers(name: str, opened, browser) -> None:
    page = opened(to_html(planned(name), model=name))
    shows_every_panel(page)
    shoot(page, name)
    clicking_opens_and_closes(page)
    searching_finds(page, MODELS[name][1])
    both_themes_read(page)


def shows_every_panel(page) -> None:
    for panel in PANELS:
        text = page.locator(f"#panel-{panel}").inner_text()
        assert len(text) > 40, panel
    assert page.locator("#graph .node").count() > 3
    assert page.locator("#panel-timeline rect").count() > 10
    assert page.locator("#panel-operators tbody tr").count() > 8
    assert page.locator(".figure").count() == 5
    words = page.locator("main").inner_text()
    assert "NaN" not in words
    assert "undefined" not in words
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0, "the page is wider than a laptop's screen"
    assert opening_seconds(page) < FASTEST


def opening_seconds(page) -> float:
    """What opening the page takes of a processor, so that a busy machine does not count."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.reload()
    page.wait_for_selector("html[data-ready]", timeout=60_000)
    metrics = session.send("Performance.getMetrics")["metrics"]
    session.detach()
    return {entry["name"]: entry["value"] for entry in metrics}["TaskDuration"]


def clicking_opens_and_closes(page) -> None:
    page.click("#fold")
    before = page.locator("#graph .node").count()
    page.click("#open")
    page.click("#open")
    opened = page.locator("#graph .node").count()
    blocks = page.evaluate("JSON.parse(document.getElementById('data').textContent).tree.children")
    assert opened > before or not any("children" in child for child in blocks)
    page.locator("#panel-operators tbody tr").first.click()
    words = page.locator("#panel-inspector").inner_text()
    for heading in ("Factors", "Collectives", "Tensors on the devices", "The runner-up"):
        assert heading.lower() in words.lower()
    assert page.locator("#panel-inspector .grid rect.cell").count() >= 8
    assert page.locator("#graph .node.on").count() == 1
    page.click("#fold")
    assert page.locator("#graph .node").count() == before
    marks = page.locator("#graph g.edge.moves[role=button]")
    if marks.count():
        marks.first.click()
        assert "Change of layout" in page.locator("#panel-inspector").inner_text()


def searching_finds(page, words: str) -> None:
    page.keyboard.press("/")
    page.keyboard.type(words)
    first = page.locator("#hits li").first
    assert first.is_visible()
    shown = first.inner_text().lower()
    assert all(word in shown for word in words.split())
    page.keyboard.press("Enter")
    assert page.locator("#hits").is_hidden()
    assert page.locator("#graph .node.on").is_visible()
    page.fill("#search", "no such operator at all")
    assert "Nothing matches" in page.locator("#hits").inner_text()
    page.keyboard.press("Escape")


def both_themes_read(page) -> None:
    def colours() -> list[str]:
        return page.evaluate(
            "['backgroundColor', 'color'].map((k) => getComputedStyle(document.body)[k])"
        )

    light = colours()
    page.click("#theme")
    dark = colours()
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    page.click("#theme")


def shoot(page, name: str) -> None:
    if KEPT is None:
        return
    folder = Path(KEPT)
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f"{name}.png")
    page.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
    page.locator("#panel-operators tbody tr").first.click()
    page.screenshot(path=folder / f"{name}-operator.png")
    page.evaluate("scrollTo(0, 0)")


class Hostile(nn.Module):
    """A model whose modules have names that would like to be markup."""

    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            self.add_module(name, nn.Linear(8, 8, bias=False))

    def forward(self, x):
        for name in NAMES:
            x = getattr(self, name)(x)
        return x.square().mean()


NAMES = (
    '<img src=x onerror="broken = 1">',
    "</script><script>broken = 1</script>",
    "\"quotes' & <b>bold</b>",
    "\u2028 Größe 層 \u202e",
)


def test_text_from_a_model_stays_text(opened) -> None:
    plan = sf.plan(Hostile(), (torch.zeros(16, 8),), {}, cluster="2x2xa100")
    page = opened(to_html(plan, title=NAMES[0]))
    assert page.evaluate("window.broken") is None
    assert page.locator("#title").inner_text() == NAMES[0]
    assert page.locator("main img, main script, main b b").count() == 0
    listed = page.locator("#panel-operators td.path").all_inner_texts()
    for name in NAMES:
        assert any(name.strip() in text for text in listed)
    page.fill("#search", "onerror")
    page.keyboard.press("Enter")
    assert NAMES[0] in page.locator("#panel-inspector").inner_text()


def test_a_report_prints(opened) -> None:
    model, args, kwargs = zoo.build("gpt2-tiny")
    page = opened(to_html(sf.plan(model, args, kwargs, cluster="2x2xa100")))
    printed = page.pdf(format="A4")
    assert printed.startswith(b"%PDF")
    assert printed.count(b"/Type /Page") > 1
    page.emulate_media(media="print")
    assert page.locator("#search").is_hidden()
    assert page.locator("#panel-operators").is_visible()


def test_a_reader_who_prefers_the_dark_gets_it(opened) -> None:
    model, args, kwargs = zoo.build("alexnet-tiny")
    page = opened(to_html(sf.plan(model, args, kwargs, cluster="4xa100")), color_scheme="dark")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
