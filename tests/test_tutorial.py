"""Every command of the README and the tutorial runs, in the order in which a reader types them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardfold.cli import main

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = ("README.md", "docs/tutorial.md")


def commands(page: str) -> list[str]:
    lines = [line for text in BLOCK.findall((ROOT / page).read_text()) for line in text.split("\n")]
    return [line.partition(" #")[0].strip() for line in lines if line.startswith("shardfold ")]


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(page: str, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    found = commands(page)
    assert len(found) >= 5
    for line in found:
        result = CliRunner().invoke(main, shlex.split(line)[1:])
        assert result.exit_code == 0, f"{line}\n{result.output}"
        assert result.output.strip(), line


def test_every_command_line_is_a_shardfold_command() -> None:
    """What the README runs besides is make, which CI runs itself."""
    for page in PAGES:
        for text in BLOCK.findall((ROOT / page).read_text()):
            for line in text.splitlines():
                assert line.startswith(("shardfold ", "make ")) or not line.strip(), line
