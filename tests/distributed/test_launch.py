"""Processes keep the memory that they free; forks have what the process has that starts them."""

from __future__ import annotations

import os
import platform
import resource

import pytest
import torch
import torch.distributed as dist

from shardfold.runtime.ranks import launch

from .ranks import start_server


def faults_of_steps(rank: int) -> int:
    """Page faults of ten times 32 MiB that are taken and given back, after three such."""
    for number in range(13):
        if number == 3:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        kept = [torch.ones(1 << 20) for _ in range(8)]
        del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_freed_memory_is_kept() -> None:
    # All ten steps have 81,920 pages. A system that is short of memory takes some away meanwhile.
    assert max(launch(faults_of_steps, 2)) < 81_920 / 2


def own(rank: int, found: list[int]) -> tuple[int, int, bool]:
    found.append(rank)
    return os.getpid(), len(found), dist.is_initialized()


def forks() -> None:
    found = [7]
    for processes in (1, 2):
        told = launch(own, processes, found, is_fork=True)
        assert len({os.getpid(), *(pid for pid, _, _ in told)}) == processes + 1
        assert [rest for _, *rest in told] == [[2, processes > 1]] * processes
    assert found == [7]


def test_forks_have_what_this_process_has() -> None:
    """In a new process: this one may have threads, which a fork would not have."""
    process = start_server().Process(target=forks)
    process.start()
    process.join()
    assert process.exitcode == 0
