"""Ranks that start in an instant: forked from a process that has captured the model already.

Nobody ends the others when one is killed, as torchrun would: they must notice by themselves.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from fault_injection.job import Job

GIVEN_UP_SECONDS = 60.0


@dataclass(frozen=True)
class Ended:
    """How the ranks of one start ended, and how long the last one outlived the first death."""

    codes: tuple[int, ...]
    outlived_seconds: float


def start_once(job: Job, number: int, ranks: int) -> Ended:
    """Start the ranks for the `number`-th time, and wait until all have ended."""
    port = _free_port()
    pids = [_fork(job, number, rank, ranks, port) for rank in range(ranks)]
    codes: dict[int, int] = {}
    died = 0.0
    while len(codes) < ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid] and not died:
                died = time.monotonic()
        elif died and time.monotonic() - died > GIVEN_UP_SECONDS:
            for left in set(pids) - set(codes):
                os.kill(left, signal.SIGKILL)
        else:
            time.sleep(0.02)
    outlived = time.monotonic() - died if died else 0.0
    return Ended(tuple(codes[pid] for pid in pids), outlived)


def preload(job: Job) -> None:
    """Import what the ranks need and capture the model for all of them; start no thread."""
    import torch

    import shardfold.api
    import shardfold.cli.run
    import shardfold.runtime.training  # noqa: F401
    from shardfold.cli.model import load_model
    from shardfold.runtime import parallelize as module

    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import fault_points  # noqa: F401

    given = sys.modules[module.__module__]
    example = load_model(job.model, {}, device="cpu")
    program = given.capture_program(example.module, example.args, example.kwargs)
    given.capture_program = lambda *args, **kwargs: program


def _fork(job: Job, number: int, rank: int, ranks: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        out = os.open(job.folder / f"{job.name}.{rank}.out", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(number),
        }
        sys.argv = job.arguments()
        import fault_points

        fault_points.begin()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found: int = server.getsockname()[1]
        return found
