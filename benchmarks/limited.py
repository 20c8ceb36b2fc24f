"""A function in a process of its own, within a time and a memory limit."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any


def limited(seconds: float, memory_bytes: int, function: Any, *args: Any) -> Any:
    """What `function(*args)` returns, from a process that is ended after so many seconds.

    It may not take more memory than it is given.
    """
    import torch.multiprocessing as mp

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="shardfold-") as folder:
        found = Path(folder) / "found"
        process = mp.get_context("fork").Process(
            target=_alone, args=(found, memory_bytes, function, args)
        )
        process.start()
        try:
            process.join(seconds)
            is_late = process.is_alive()
        finally:  # also where this process is ended: nothing of it stays behind
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        if is_late:
            raise TimeoutError(f"No result after {seconds:.0f} s.")
        if not found.exists():
            raise RuntimeError(f"The process ended with {process.exitcode}, without a result.")
        return pickle.loads(found.read_bytes())


def _alone(found: Path, memory_bytes: int, function: Any, args: Any) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    found.write_bytes(pickle.dumps(function(*args)))
