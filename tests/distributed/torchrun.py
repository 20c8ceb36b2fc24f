"""Commands as torchrun starts them, in processes that need not import torch.

`test_pages.py` runs torchrun itself.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from shardfold.cli import main

from .ranks import start_server


def start_as_torchrun(
    words: list[str],
    folder: Path,
    processes: int,
    around: Callable[[], Any] = contextlib.nullcontext,
) -> None:
    """Run a command of shardfold on every process, within `around`; all must succeed."""
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    given["WORLD_SIZE"] = str(processes)
    started = [
        start_server().Process(
            target=_run, args=({**given, "RANK": str(rank)}, words, folder, around)
        )
        for rank in range(processes)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * processes


def _run(
    environment: dict[str, str], words: list[str], folder: Path, around: Callable[[], Any]
) -> None:
    os.environ.update(environment)
    os.chdir(folder)
    with around():
        result = CliRunner().invoke(main, words)
    print(result.output)
    sys.exit(result.exit_code)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
