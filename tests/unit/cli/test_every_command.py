"""What holds for every command: help with an example, JSON, 80 columns, silence when piped."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from shardfold.cli import COMMANDS, main

SAMPLE = {
    "plan": ("plan", "alexnet-tiny", "--cluster", "2x2xa100"),
    "show": ("show", "PLAN"),
    "report": ("report", "PLAN", "-o", "FOLDER/page.html"),
    "scale": ("scale", "alexnet-tiny", "--cluster", "2xa100", "--nodes", "1,2"),
    "export": ("export", "PLAN", "--to", "deepspeed", "--model", "alexnet-tiny"),
    "explain": ("explain", "PLAN", "fc6", "--model", "alexnet-tiny", "--seconds", "1"),
    "what-if": ("what-if", "PLAN", "--model", "alexnet-tiny", "--optimizer", "sgd"),
    "compare": (
        "compare",
        "alexnet-tiny",
        "--cluster",
        "2x2xa100",
        "--methods",
        "selected,greedy",
    ),
    "simulate": ("simulate", "PLAN"),
    "launch": ("launch", "PLAN", "--", "train.py"),
    "models": ("models",),
    "clusters": ("clusters",),
    "solve": ("solve", "PROBLEM"),
}
RUNNING = ("check", "train")  # start processes: tried on one device


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("every")
    made = ("--save", f"{folder}/plan.json", "--save-problem", f"{folder}/problem.npz")
    run("plan", "alexnet-tiny", "--cluster", "2x2xa100", *made)
    run("plan", "alexnet-tiny", "--cluster", "1xa100", "--save", f"{folder}/one.json")
    return folder


def run(*arguments: str, **environment: str):
    result = CliRunner().invoke(main, arguments, env=environment)
    assert result.exit_code == 0, result.output
    return result


def given(name: str, folder: Path) -> tuple[str, ...]:
    words = {"PLAN": f"{folder}/plan.json", "PROBLEM": f"{folder}/problem.npz"}
    return tuple(words.get(w, w.replace("FOLDER", str(folder))) for w in SAMPLE[name])


def command(name: str) -> click.Command:
    context = click.Context(main)
    found = main.get_command(context, name)
    assert found is not None
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_has_an_example_on_a_line_of_its_own(name: str) -> None:
    lines = [line.strip() for line in run(name, "--help").output.splitlines()]
    assert any(line.startswith((f"shardfold {name}", "torchrun")) for line in lines)
    assert not any("\\b" in line for line in lines)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_speaks_json(name: str) -> None:
    assert any("--json" in parameter.opts for parameter in command(name).params)


@pytest.mark.parametrize("name", SAMPLE)
def test_json_is_all_that_is_printed(name: str, folder: Path) -> None:
    words = given(name, folder)
    at = words.index("--") if "--" in words else len(words)
    result = run(*words[:at], "--json", *words[at:])
    json.loads(result.stdout)
    assert result.stderr == ""


@pytest.mark.parametrize("name", RUNNING)
def test_running_speaks_json(name: str, folder: Path) -> None:
    more = ("--steps", "2") if name == "train" else ()
    plan = f"{folder}/one.json"
    found = json.loads(run(name, "alexnet-tiny", "--plan", plan, "--json", *more).stdout)
    assert found.get("equal", True) is True
    assert len(found.get("steps", (1, 2))) == 2


@pytest.mark.parametrize("name", sorted(set(SAMPLE) - {"launch", "report"}))
def test_tables_fit_80_columns(name: str, folder: Path) -> None:
    result = run(*given(name, folder), COLUMNS="80")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert result.stdout.strip()


@pytest.mark.parametrize(
    "words", [("clusters", "4x8xh100"), ("plan", "gpt2", "--cluster", "4x8xa100", "--all")]
)
def test_wide_things_fit_80_columns_too(words: tuple[str, ...]) -> None:
    result = run(*words, COLUMNS="80")
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_piped_output_has_no_colours_and_no_progress(folder: Path) -> None:
    words = [sys.executable, "-m", "shardfold", *given("plan", folder)]
    found = subprocess.run(words, capture_output=True, text=True, check=True, env=plain())
    assert found.stderr == ""
    assert "\x1b" not in found.stdout


def plain() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "COLUMNS")}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_installed(shell: str) -> None:
    words = [sys.executable, "-c", "from shardfold.cli import main; main(prog_name='shardfold')"]
    environment = {**plain(), "_SHARDFOLD_COMPLETE": f"{shell}_source"}
    found = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if shell == "bash" and "Bash version" in found.stderr:
        pytest.skip("bash is too old for completion")
    assert "_SHARDFOLD_COMPLETE" in found.stdout


@pytest.mark.parametrize(
    ("typed", "offered"), [("shardfold re", "report"), ("shardfold plan --clu", "--cluster")]
)
def test_words_are_completed(typed: str, offered: str) -> None:
    words = [sys.executable, "-c", "from shardfold.cli import main; main(prog_name='shardfold')"]
    environment = {
        **plain(),
        "_SHARDFOLD_COMPLETE": "bash_complete",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
    }
    found = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert f"plain,{offered}" in found.stdout.split()


def test_the_table_of_commands_is_complete() -> None:
    for name, (module, line) in COMMANDS.items():
        assert callable(getattr(import_module(module), name.replace("-", "_")))
        assert len(line) <= 64


PAGE = Path(__file__).parents[3] / "docs" / "reference" / "cli.md"


def test_the_page_lists_every_command_and_option() -> None:
    sections = PAGE.read_text().split("\n## ")
    table = sections[0]
    for name in COMMANDS:
        assert f"| `shardfold {name}" in table, name
        (own,) = [text for text in sections if f"`{name}`" in text.partition("\n")[0]]
        named = set(re.findall(r"`(-{1,2}[a-z][a-z-]*)", own))
        if "planning options" in own:
            named |= _options(sections, "Planning options")
        if "sizes" in own.lower():
            named |= _options(sections, "Sizes")
        real = {
            word
            for parameter in command(name).params
            if isinstance(parameter, click.Option)
            for word in (*parameter.opts, *parameter.secondary_opts)
            if word.startswith("--")
        }
        assert real - named == set(), name
        ours = re.findall(r"^\| ((?:`-[^|]*`,? ?)+)\|", own, re.MULTILINE)
        listed = {word for cell in ours for word in re.findall(r"--[a-z][a-z-]*", cell)}
        assert listed - real == set(), name


def _options(sections: list[str], title: str) -> set[str]:
    (text,) = [text for text in sections if text.startswith(title)]
    return set(re.findall(r"`(--[a-z][a-z-]*)", text))


def test_the_page_has_every_exit_code() -> None:
    from shardfold.cli import INTERRUPTED, LOST, REFUSED
    from shardfold.cli.run import TERMINATED

    (codes,) = [t for t in PAGE.read_text().split("\n## ") if t.startswith("Output and exit codes")]
    found = {int(number) for number in re.findall(r"^\| (\d+) \|", codes, re.MULTILINE)}
    assert found == {0, 1, REFUSED, LOST, INTERRUPTED, TERMINATED}
