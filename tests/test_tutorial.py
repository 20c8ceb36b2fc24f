"""Every command of the README, the tutorial and the how-tos runs, in the order of a reader."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardfold.cli import main

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = ("README.md", "docs/tutorial.md")
# `tests/distributed/test_add_a_rule.py` runs the page on rules.
HOW_TOS = sorted(
    page.stem
    for page in (ROOT / "docs/how-to").glob("*.md")
    if "\nshardfold " in page.read_text() and page.stem != "add-a-rule"
)
# The how-tos speak of models in full size. Their small ones have the same operators.
FULL = re.compile(r"(?<= )(alexnet|gpt2)(?= |$)")
DEEP = re.compile(r"(?<= )(llama3-8b)(?= |$)")  # where no number of layers is stated
# These measure a machine for minutes: `tests/distributed/test_calibration.py` measures little.
MEASURES = "shardfold calibrate "
# By default these look for as long as a reader waits: for less, all that they print is there.
EFFORT = {
    "shardfold explain ": ["--seconds", "1"],
    "shardfold compare ": ["--moves", "1000", "--ilp-seconds", "2"],
}
REFUSED = {"fc6=out/3": "has no such split"}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}


def commands(page: str) -> list[str]:
    lines = [line for text in BLOCK.findall((ROOT / page).read_text()) for line in text.split("\n")]
    return [line.partition(" #")[0].strip() for line in lines if line.startswith("shardfold ")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a reader types, with what the pages take for granted."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shutil.copy(ROOT / "benchmarks/profiles/h200.json", tmp_path / "machine.json")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def typed(line: str, folder: Path) -> None:
    """Run a line, and keep what it prints if it says so."""
    command, _, file = line.partition(" > ")
    has_model = "--cluster" in command or "--model" in command
    effort = next((more for start, more in EFFORT.items() if command.startswith(start)), [])
    result = CliRunner().invoke(main, shlex.split(command)[1:] + effort * has_model)
    refusal = next((says for part, says in REFUSED.items() if part in line), None)
    assert bool(result.exit_code) == bool(refusal), f"{line}\n{result.output}"
    assert (refusal or "") in result.output
    assert result.output.strip(), line
    if file:
        (folder / file).write_text(result.stdout)


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(page: str, folder: Path) -> None:
    found = commands(page)
    assert len(found) >= 5
    for line in found:
        typed(line, folder)


@pytest.mark.parametrize("page", HOW_TOS)
def test_the_commands_of_a_how_to_run(page: str, folder: Path) -> None:
    found = [c for c in commands(f"docs/how-to/{page}.md") if not c.startswith(MEASURES)]
    assert found
    for line in found:
        full = DEEP if page == "use-another-stack" else FULL
        typed(full.sub(r"\1-tiny", line), folder)


def test_every_command_line_is_a_shardfold_command() -> None:
    """What the README runs besides is make, which CI runs itself."""
    for page in PAGES:
        for text in BLOCK.findall((ROOT / page).read_text()):
            for line in text.splitlines():
                assert line.startswith(("shardfold ", "make ")) or not line.strip(), line
