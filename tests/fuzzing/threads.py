"""Ranks that are threads of one process: a plan runs on all of them without starting any.

The runner is the real one, on a process group of torch's own tests. What shardfold keeps for a
process is kept for each thread.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from shardfold.runtime import process_groups

Result = TypeVar("Result")
WAIT = 60.0  # seconds for what another rank sends


class _PerThread(threading.local):
    """What `process_groups` shares among the modules of a rank."""

    def __init__(self) -> None:
        self.world: Any = None
        self.found: dict[tuple[Any, ...], Any] = {}


def _exchanged(letters: dict[tuple[int, int], SimpleQueue[torch.Tensor]], steps: list[Any]) -> Any:
    """What goes between two ranks alone, which the group of torch's tests does not know."""
    me = dist.get_rank()
    for step in steps:
        if step.op is dist.isend:
            letters[me, step.peer].put(step.tensor.clone())
    for step in steps:
        if step.op is dist.irecv:
            step.tensor.copy_(letters[step.peer, me].get(timeout=WAIT))
    return ()


@contextmanager
def _group(world: int) -> Iterator[dist.Store]:
    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        with (
            patch.object(process_groups, "_SHARED", _PerThread()),
            patch.object(dist, "batch_isend_irecv", partial(_exchanged, defaultdict(SimpleQueue))),
        ):
            yield dist.HashStore()
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()


def on_threads(job: Callable[[int], Result], world: int) -> list[Result]:
    """What a job gives on every rank; the first error of any is raised."""
    found: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(rank: int, store: dist.Store) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
        try:
            found[rank] = job(rank)
        except BaseException as error:
            errors.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    with _group(world) as store:
        ranks = [threading.Thread(target=run, args=(rank, store)) for rank in range(world)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    threaded.ProcessLocalGroup.reset()
    if errors:
        raise next((e for e in errors if not _is_echo(e)), errors[0])
    return [found[rank] for rank in range(world)]


def _is_echo(error: BaseException) -> bool:
    """Whether an error only says that another rank had one."""
    return isinstance(error, threading.BrokenBarrierError) or "terminat" in str(error).lower()
