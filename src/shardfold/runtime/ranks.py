"""The ranks of a run: how they start, and how they agree.

`launch` starts a function on local processes and collects what it returns. What torchrun has
started already is used as it is. An error on any rank ends all of them, within seconds, with the
first one's message.

An error on one rank is raised on every rank. A rank that gave up alone would leave the others
waiting for it in their next collective.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import pickle
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from shardfold.errors import LostError, RunError, ShardfoldError
from shardfold.plans.build import installed_versions

WAIT = timedelta(seconds=120)
PRELOADED = ["shardfold.runtime.parallelize", "torch._dynamo"]  # optimizers import the latter
NEVER_MAPPED, TRIMMED_AT = -4, -1  # M_MMAP_MAX and M_TRIM_THRESHOLD of malloc.h
# What torch.distributed says where a rank does not answer any more.
LOST = ("Connection closed", "Connection reset", "Broken pipe", "timed out", "Timed out", "NCCL")


def is_started() -> bool:
    """Whether torchrun started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(
    function: Callable[..., Any],
    processes: int,
    *args: Any,
    is_fork: bool = False,
    wait: timedelta = WAIT,
) -> list[Any]:
    """Call `function(rank, *args)` on every process; what each returns, by rank.

    With `is_fork` each process is a copy of this one, has all that this one has captured, and is
    another process even if it is the only one. This one must not have run a backward pass:
    autograd's threads do not survive a fork. Ranks wait for each other for as long as `wait`.
    """
    if processes == 1 and not is_fork:
        return [function(0, *args)]
    # Each process takes an equal share of the cores, or they would fight for them.
    threads = 1 if is_fork else max(1, (os.cpu_count() or 1) // processes)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="shardfold-") as folder:
        given = (processes, threads, wait, Path(folder), dict(os.environ), function, args)
        method = "fork" if is_fork else _start_method()
        try:
            mp.start_processes(_process, given, processes, start_method=method)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise _failure(Path(folder), error) from None
        return [
            pickle.loads((Path(folder) / f"{rank}.result").read_bytes())
            for rank in range(processes)
        ]


def _start_method() -> str:
    """On Linux all are forked from one process, which imports torch for all of them."""
    if sys.platform != "linux":
        return "spawn"
    mp.get_context("forkserver").set_forkserver_preload(PRELOADED)
    return "forkserver"


@contextmanager
def joined(wait: timedelta = WAIT) -> Iterator[tuple[int, int]]:
    """The process group that torchrun described; rank and number of processes.

    A collective that takes longer than `wait` is an error: a rank or a link is lost.
    """
    _initialise(wait)
    try:
        yield dist.get_rank(), dist.get_world_size()
    except RuntimeError as error:
        if not any(sign in str(error) for sign in LOST):
            raise
        raise LostError(
            f"Another process has ended, or the link to it is lost ({_last_line(error)}): what it "
            "said itself comes first. Training goes on from the last checkpoint when all are back."
        ) from error
    finally:
        dist.destroy_process_group()


def join_torchrun() -> None:
    """Join the other processes that torchrun started, unless the script has already done so.

    The group is left when the process ends.
    """
    if not dist.is_available() or dist.is_initialized() or not is_started():
        return
    if int(os.environ["WORLD_SIZE"]) > 1:
        _initialise(WAIT)
        leave_at_exit()


def _initialise(wait: timedelta) -> None:
    """A process group on this process's own GPU with NCCL, or on the CPU with gloo."""
    if not torch.cuda.is_available():
        keep_freed_memory()
        dist.init_process_group("gloo", timeout=wait)
        return
    local, there = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local >= there:
        raise RunError(
            f"Process {local} of this node has no GPU of its own: {there} can be seen. Start "
            f"{there} with --nproc-per-node {there}, or set CUDA_VISIBLE_DEVICES= to run on CPUs."
        )
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", timeout=wait)


def leave_at_exit() -> None:
    """Leave the process group before Python ends: threads of gloo that go on then may abort."""
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def keep_freed_memory() -> None:
    """Let the C library keep what is freed, for the next step.

    glibc gives large blocks back to the system. The gradients of every step would be faulted in
    page by page again, which can take longer than to compute them. Other libraries are left alone.
    """
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        library.mallopt(NEVER_MAPPED, 0)
        library.mallopt(TRIMMED_AT, -1)


def _process(
    rank: int,
    processes: int,
    threads: int,
    wait: timedelta,
    folder: Path,
    environment: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.clear()  # it may have changed since the process was started that this is a fork of
    os.environ.update(environment)
    torch.set_num_threads(threads)
    keep_freed_memory()
    if processes > 1:
        store = f"file://{folder / 'store'}"
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=processes, timeout=wait
        )
    try:
        found = function(rank, *args)
    except ShardfoldError as error:
        (folder / f"{rank}.error").write_text(str(error))
        raise
    (folder / f"{rank}.result").write_bytes(pickle.dumps(found))
    # Threads of the process group may outlive it: leave without waiting for their end, and not
    # before the others are done with this process.
    if processes > 1:
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _failure(folder: Path, error: Exception) -> RunError:
    """What shardfold itself said on the lowest rank, or the last line of what was raised."""
    said = sorted(folder.glob("*.error"))
    if said:
        return RunError(said[0].read_text())
    return LostError(f"A process ended: {_last_line(error)}")


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


T = TypeVar("T")


SHOWN = 5  # tensors that are named
CHUNK = 1 << 22  # elements of a tensor that are summed up at once


def is_shared() -> bool:
    """Whether several processes take part."""
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def agreed(function: Callable[[], T]) -> T:
    """The result of `function`, if it has one on every rank; else an error on every rank."""
    if not is_shared():
        return function()
    failed: ShardfoldError | None = None
    try:
        found = function()
    except ShardfoldError as error:
        failed = error
    told: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, None if failed is None else str(failed))
    if failed is not None:
        raise failed
    for rank, said in enumerate(told):
        if said is not None:
            raise RunError(f"Rank {rank} cannot run the plan, so no rank does: {said}")
    return found


def versions() -> dict[str, str]:
    """Of the code that ranks run, which must be the same."""
    found = installed_versions("shardfold", "torch")
    return {f"version of {name}": version for name, version in found.items()}


def digest(text: str) -> str:
    """A short name for a long text.

    >>> digest("plan")
    '8eb3fa28'
    """
    return sha256(text.encode()).hexdigest()[:8]


def check_alike(facts: Mapping[str, str], advice: str) -> None:
    """Refuse to start, on every rank, where the ranks were given different things."""
    if not is_shared():
        return
    told: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(told, dict(facts))
    names = list(dict.fromkeys(name for each in told for name in each))
    differing = [name for name in names if len({each.get(name) for each in told}) > 1]
    if not differing:
        return
    shown = "; ".join(_told(name, told) for name in differing[:SHOWN])
    more = f"; and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
    raise RunError(f"The ranks were not started alike. {shown}{more}. {advice}")


def check_readers_alike(parts: Mapping[str, str]) -> None:
    """Refuse a batch of which ranks that read the same part were given different numbers."""
    told: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(told, dict(parts))
    for name in dict.fromkeys(name for each in told for name in each):
        who = [each for each in told if name in each]
        if len({each[name] for each in who}) > 1:
            ranks = _listed([rank for rank, each in enumerate(told) if name in each])
            raise RunError(
                f"Ranks {ranks} read the same {name.partition(' (')[0]} and were given different "
                "numbers. Give every rank the same whole batch, or its own part of it: "
                "plan.local_batch(batch), or a DataLoader with plan.sampler(dataset)."
            )


def is_same_everywhere(fact: str) -> bool:
    """Whether all ranks were given the same."""
    if not is_shared():
        return True
    told: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(told, fact)
    return len(set(told)) == 1


def _told(name: str, told: Sequence[Mapping[str, str]]) -> str:
    """Who has what: `seed: 0 on rank 0, 2, 3, but 5 on rank 1`."""
    who: dict[str, list[int]] = {}
    for rank, each in enumerate(told):
        who.setdefault(each.get(name, "nothing"), []).append(rank)
    parts = (f"{value} on rank {_listed(ranks)}" for value, ranks in who.items())
    return f"{name}: {', but '.join(parts)}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:SHOWN])) + (", ..." if len(ranks) > SHOWN else "")


def fingerprint(tensor: Tensor) -> str:
    """Two sums of a tensor in words: what other values, or another order, would change."""
    plain, by_position = two_sums(tensor).tolist()
    return f"{tuple(tensor.shape)} {plain:.17g} {by_position:.17g}"


@torch.no_grad()
def two_sums(tensor: Tensor) -> Tensor:
    """The sum of a tensor and one by position, a piece at a time: it may fill the device."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    total = torch.zeros(2, dtype=torch.float64, device=tensor.device)
    for part in flat.split(CHUNK):
        wide = part.double()
        ramp = torch.arange(len(part), device=tensor.device, dtype=torch.float64) % 1021 + 1
        total += torch.stack([wide.sum(), (wide * ramp).sum()])
    return total


def check_tensors_alike(found: Mapping[str, str]) -> None:
    """Refuse weights or buffers that differ between ranks: every copy must start alike."""
    if not is_shared():
        return
    told: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(told, digest(repr(sorted(found.items()))))
    if len(set(told)) > 1:
        short = {name: digest(value) for name, value in found.items()}
        check_alike(
            short,
            "Seed all ranks alike before building the model, or load the same checkpoint on all.",
        )
