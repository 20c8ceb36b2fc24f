"""Processes of a benchmark that have all that this one has, and need not make it again."""

from __future__ import annotations

import os
import pickle
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

PATIENCE = timedelta(minutes=30)


def forked(processes: int, function: Any, *args: Any, patience: timedelta = PATIENCE) -> Any:
    """What `function(rank, *args)` returns on rank 0; for so long, ranks wait for each other.

    This process must not have run a backward pass: autograd's threads do not survive a fork.
    """
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory(prefix="shardfold-") as folder:
        given = (processes, folder, patience, function, args)
        mp.start_processes(_process, given, nprocs=processes, start_method="fork")
        return pickle.loads((Path(folder) / "found").read_bytes())


def _process(
    rank: int, processes: int, folder: str, patience: timedelta, function: Any, args: Any
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if processes > 1:
        store = f"file://{folder}/store"
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=processes, timeout=patience
        )
    found = function(rank, *args)
    if rank == 0:
        (Path(folder) / "found").write_bytes(pickle.dumps(found))
    if processes > 1:
        dist.barrier()  # no rank leaves while another still needs it
    os._exit(0)
