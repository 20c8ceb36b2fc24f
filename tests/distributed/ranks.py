"""Processes that stay: the jobs of many tests run on them, each in a process group of its own.

`launch` of the library starts processes for one call; to start them and to import torch takes
longer than most jobs do. A test of how processes start or end uses `launch` itself.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import tempfile
import traceback
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import debug

from captures import captured_once
from shardfold.errors import RunError, ShardfoldError
from shardfold.runtime import process_groups, ranks
from shardfold.runtime.ranks import WAIT, keep_freed_memory

Launch = Callable[..., list[Any]]  # job, number of processes, arguments
Told = tuple[Literal["returned", "refused", "raised", "ended", "crashed"], Any]
ENDING = ("crashed", "ended", "raised")  # what one raises may be for want of one that ended
GRACE = 1.0  # seconds in which a process has ended whose connections broke
PATIENCE = 60.0  # seconds in which what one rank refuses, the others refuse too
# They are imported once, and every process is forked from there.
MODELS = ("bert", "gpt2", "llama", "mixtral", "t5", "vit")
PRELOADED = [
    *(f"transformers.models.{name}.modeling_{name}" for name in MODELS),
    "hypothesis",
    "pytest",
    "shardfold.api",
    "shardfold.zoo.huggingface",
    "torch.export._trace",
    *ranks.PRELOADED,
]

_meshes: list[weakref.ref[DeviceMesh]] = []  # that jobs made in this process


def start_server() -> Any:
    """Start the process that all are forked from, those of `launch` too, unless it is there."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    return context


class Crashed(AssertionError):
    """A signal ended a process."""


class Ranks:
    """As many processes as the largest job has asked for; a smaller one has the first of them."""

    def __init__(self, captures_folder: Path) -> None:
        self.captures_folder = captures_folder
        self.lines: list[Connection] = []
        self.processes: list[Any] = []
        self.folder = tempfile.TemporaryDirectory(prefix="shardfold-")

    def run(self, job: Callable[..., Any], processes: int, *args: Any) -> list[Any]:
        """Call `job(rank, *args)` on so many processes; what each returns, by rank."""
        if processes == 1:  # here, and without a group, as `launch` does it
            return [job(0, *args)]
        try:
            return self._run(job, processes, args)
        except Crashed as crash:  # a thread of gloo's did, once in many runs: in malloc
            warnings.warn(f"Tried once more, in new processes. {crash}", stacklevel=2)
            return self._run(job, processes, args)

    def _run(self, job: Callable[..., Any], processes: int, args: tuple[Any, ...]) -> list[Any]:
        self._start(processes)
        with tempfile.TemporaryDirectory(prefix="shardfold-") as folder:
            sent = pickle.dumps((job, processes, Path(folder) / "store", Path.cwd(), args))
            for line in self.lines[:processes]:
                line.send_bytes(sent)
            return self._collected(self.lines[:processes])

    def stop(self) -> None:
        """End the processes; the next job starts others."""
        for process in self.processes:
            process.kill()
            process.join()
        self.lines, self.processes = [], []

    def _start(self, wanted: int) -> None:
        context = start_server()
        for rank in range(len(self.lines), wanted):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, there, self._last_words(rank), self.captures_folder),
                daemon=True,
            )
            process.start()
            there.close()
            self.lines.append(here)
            self.processes.append(process)

    def _last_words(self, rank: int) -> Path:
        return Path(self.folder.name) / f"{rank}.txt"

    def _ended(self, rank: int) -> Told:
        """How a process ended that told nothing, and where it was."""
        self.processes[rank].join()
        code = self.processes[rank].exitcode
        said = f"The process ended with code {code}.\n{self._last_words(rank).read_text()}"
        return "crashed" if code < 0 else "ended", said

    def _collected(self, lines: list[Connection]) -> list[Any]:
        """What all returned. What one raises ends them all: the others may wait for it."""
        told: dict[int, Told] = {}
        while len(told) < len(lines):
            silent = [line for rank, line in enumerate(lines) if rank not in told]
            ready = wait(silent, _patience({how for how, _ in told.values()}))
            for rank in (lines.index(line) for line in ready):  # type: ignore[arg-type]
                told[rank] = _received(lines[rank]) or self._ended(rank)
            if not ready:
                self.stop()
                break
        raised = [rank for way in ENDING for rank in sorted(told) if told[rank][0] == way]
        if raised:
            self.stop()
            how, what = told[raised[0]]
            error = Crashed if how == "crashed" else AssertionError
            raise error(f"On rank {raised[0]} of {len(lines)}:\n{what}")
        for how, what in (told[rank] for rank in sorted(told)):
            if how == "refused":
                raise RunError(what)
        return [told[rank][1] for rank in range(len(lines))]


def _patience(told: set[str]) -> float | None:
    """Seconds to wait for another rank, by what the others told."""
    if told & {"crashed", "ended"}:
        return 0.0
    return GRACE if "raised" in told else PATIENCE if "refused" in told else None


def _received(line: Connection) -> Told | None:
    try:
        told: Told = pickle.loads(line.recv_bytes())
    except (EOFError, ConnectionResetError):
        return None
    return told


def _serve(rank: int, line: Connection, last_words: Path, captures_folder: Path) -> None:
    """Do jobs until nobody is there to send any."""
    faulthandler.enable(last_words.open("w"))
    gc.freeze()
    torch.set_num_threads(1)
    keep_freed_memory()
    with captured_once(captures_folder), suppress(EOFError):
        while True:
            line.send_bytes(pickle.dumps(_told(rank, *pickle.loads(line.recv_bytes()))))
            # What a job leaves (modules, programs) the next need not look through for cycles.
            gc.collect()
            gc.freeze()


def _told(
    rank: int,
    job: Callable[..., Any],
    processes: int,
    store: Path,
    here: Path,
    args: tuple[Any, ...],
) -> Told:
    os.chdir(here)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=processes, timeout=WAIT
    )
    dist.barrier()  # a job that refuses at once leaves no rank that is still connecting
    try:
        found = job(rank, *args)
        dist.barrier()  # no rank leaves the group while another still needs it
        told: Told = "returned", found
    except ShardfoldError as error:
        told = "refused", str(error)
    except Exception:
        return "raised", traceback.format_exc()
    gc.collect()  # nothing of the job outlives its group
    dist.destroy_process_group()
    _release_groups()
    return told


def _release_groups() -> None:
    """Let go of the groups of a job: each has threads, which wake a hundred times in a second.

    DTensor's caches keep the meshes, which are equal to those of the next job: what is cached names
    groups that are gone.
    """
    debug._clear_sharding_prop_cache()
    _meshes.extend(weakref.ref(each) for each in gc.get_objects() if type(each) is DeviceMesh)
    for mesh in filter(None, (found() for found in _meshes)):
        mesh._pg_registry.clear()
    process_groups.shared(("nothing",), lambda: None)  # there is no default group any more
