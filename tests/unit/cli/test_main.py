from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module

import click
import pytest

import shardfold
from shardfold.cli import COMMANDS, main
from shardfold.errors import InfeasibleError, InputError, LostError, RunError

HEAVY = {"torch", "numpy", "scipy", "rich", "transformers"}


def loaded_by(code: str) -> tuple[set[str], float]:
    """What a fresh interpreter has imported after `code`, and the processor's time."""
    program = (
        "import sys, time, json\n"
        "started = time.process_time()\n"
        f"{code}\n"
        "print(json.dumps([sorted({m.partition('.')[0] for m in sys.modules}), "
        "time.process_time() - started]))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    names, seconds = json.loads(output.splitlines()[-1])
    return set(names), seconds


def test_import_shardfold_is_light() -> None:
    names, _ = loaded_by("import shardfold")
    assert not names & HEAVY
    # Caches may be cold: the best of three is what the import costs.
    assert min(loaded_by("import shardfold")[1] for _ in range(3)) < 0.3


def test_help_is_light() -> None:
    code = "from shardfold.cli import main\nmain(['--help'], standalone_mode=False)"
    names, _ = loaded_by(code)
    assert not names & HEAVY
    assert min(loaded_by(code)[1] for _ in range(3)) < 0.3


def test_the_public_names_are_sorted_and_there() -> None:
    assert sorted(shardfold.__all__) == shardfold.__all__
    assert all(hasattr(shardfold, name) for name in shardfold.__all__)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_where_the_table_says(name: str) -> None:
    module, line = COMMANDS[name]
    command = getattr(import_module(module), name.replace("-", "_"))
    assert isinstance(command, click.Command)
    assert command.name == name
    assert command.help
    assert line.endswith(".")


def test_help_lists_every_command(run) -> None:
    output = run("--help").output
    assert all(f"\n  {name} " in output for name in COMMANDS)
    assert "shardfold plan alexnet --cluster 4x8x1080ti" in output


def test_version(run) -> None:
    assert run("--version").output == f"shardfold, version {shardfold.__version__}\n"


def test_an_unknown_command_suggests_the_nearest(refused) -> None:
    assert refused("showw") == "No command is called 'showw'. Did you mean show?"


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (InputError("Not so."), 2, "Error: Not so."),
        (InfeasibleError(needed_bytes=2, limit_bytes=1), 2, "Error: No choice fits"),
        (RunError("No such split."), 2, "Error: No such split."),
        (LostError("Rank 1 is gone."), 3, "Error: Rank 1 is gone."),
        (KeyboardInterrupt(), 130, "Interrupted."),
    ],
)
def test_errors_and_interrupts_end_in_a_message(run, monkeypatch, raised, code, message) -> None:
    @click.command()
    def models() -> None:
        raise raised

    monkeypatch.setattr("shardfold.cli.model.models", models)
    result = run("models")
    assert result.exit_code == code
    assert message in result.stderr
    assert "Traceback" not in result.output


def _seconds_of_children() -> float:
    used = os.times()
    return used.children_user + used.children_system


def test_the_console_script_leaves_without_a_traceback() -> None:
    before = _seconds_of_children()
    done = subprocess.run(
        [sys.executable, "-c", "from shardfold.cli import main; main()", "show", "nowhere.json"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Error: Cannot read the plan nowhere.json: No such file or directory.\n"
    assert _seconds_of_children() - before < 10
    assert main.name == "main"
