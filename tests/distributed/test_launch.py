"""Processes keep the memory that they free: a step that takes it again meets no page faults."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

from shardfold.runtime.ranks import launch


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
    assert max(launch(faults_of_steps, 2)) < 8192  # one step's pages; all ten have 81,920
