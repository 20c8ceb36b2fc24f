"""README and docs hold: code runs, output is real, commands parse, links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import xml.etree.ElementTree as ElementTree
from importlib import import_module
from pathlib import Path

import pytest

from shardfold.cli import COMMANDS
from shardfold.report.units import seconds

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN = (
    "README.md",
    "docs/tutorial.md",
    "docs/how-to/plan-your-own-model.md",
    "docs/how-to/compare.md",
    "docs/how-to/estimate.md",
    "docs/how-to/use-another-stack.md",
    "docs/how-to/explain-and-pin.md",
    "docs/how-to/hugging-face.md",
    "docs/how-to/add-a-cost-model.md",
    "docs/how-to/add-a-searcher.md",
    "docs/how-to/shell-and-notebook.md",
)


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


def commands() -> list[str]:
    lines = [line for page in PAGES for text in blocks(page, "sh") for line in text.splitlines()]
    return sorted(
        {line.partition("#")[0].strip() for line in lines if line.startswith("shardfold ")}
    )


@pytest.mark.parametrize("name", RUN)
def test_python_blocks_run(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    printed = io.StringIO()
    for code in blocks(ROOT / name, "python"):
        with contextlib.redirect_stdout(printed):
            exec(compile(code, name, "exec"), names)
    if name == "README.md":
        (shown, *_) = blocks(ROOT / name, "text")
        assert without_timing(printed.getvalue()) == without_timing(shown)


def without_timing(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("Captured in")]


@pytest.mark.parametrize("line", commands())
def test_commands_parse(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    module, _ = COMMANDS[name]
    command = getattr(import_module(module), name.replace("-", "_"))
    command.make_context(name, arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(BLOCK, "", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith("http"):
            assert (page.parent / target.partition("#")[0]).exists(), f"{page}: {target}"


def test_every_page_is_reached_from_the_index() -> None:
    reached, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if not target.startswith("http"):
                left.append((page.parent / target.partition("#")[0]).resolve())
    assert set(PAGES) <= reached


def test_the_table_of_results_is_the_measured_one() -> None:
    text = (ROOT / "README.md").read_text()
    results = json.loads((ROOT / "docs/results/readme.json").read_text())["results"]
    for result in results:
        row = next(
            line for line in text.splitlines() if line.startswith(f"| `{result['model']}` |")
        )
        assert f"| {seconds(result['step_seconds'])} |" in row
        ratio = result["data_parallel_seconds"] / result["step_seconds"]
        assert f"| {ratio:.2f}x" in row


def test_the_figure_is_drawn_from_the_measured_results() -> None:
    results = json.loads((ROOT / "docs/results/readme.json").read_text())["results"]
    figure = (ROOT / "docs/results/speedup.svg").read_text()
    ElementTree.fromstring(figure)
    for result in results:
        if result["cluster"] == "4x8x1080ti":
            assert f"{result['data_parallel_seconds'] / result['step_seconds']:.2f}x" in figure
