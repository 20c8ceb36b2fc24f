"""Processes of a benchmark that have all that this one has, and need not make it again."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
import tempfile
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

PATIENCE = timedelta(minutes=30)


def forked(processes: int, function: Any, *args: Any, patience: timedelta = PATIENCE) -> Any:
    """What `function(rank, *args)` returns on rank 0; for so long, ranks wait for each other.

    This process must not have run a backward pass: autograd's threads do not survive a fork.
    What a rank refuses is refused here, in the same words.
    """
    import torch.multiprocessing as mp

    from shardfold.errors import ShardfoldError

    with tempfile.TemporaryDirectory(prefix="shardfold-") as folder:
        given = (processes, folder, patience, function, args)
        try:
            mp.start_processes(_process, given, nprocs=processes, start_method="fork")
        except mp.ProcessRaisedException:
            refused = Path(folder) / "refused"
            if refused.exists():
                raise ShardfoldError(refused.read_text()) from None
            raise
        return pickle.loads((Path(folder) / "found").read_bytes())


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


def _process(
    rank: int, processes: int, folder: str, patience: timedelta, function: Any, args: Any
) -> None:
    import torch
    import torch.distributed as dist

    from shardfold.errors import ShardfoldError

    torch.set_num_threads(1)
    if processes > 1:
        store = f"file://{folder}/store"
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=processes, timeout=patience
        )
    try:
        found = function(rank, *args)
    except ShardfoldError as error:
        (Path(folder) / "refused").write_text(str(error))
        raise
    if rank == 0:
        (Path(folder) / "found").write_bytes(pickle.dumps(found))
    if processes > 1:
        dist.barrier()  # no rank leaves while another still needs it
    os._exit(0)
