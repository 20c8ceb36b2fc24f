"""The processes that stay: what a job raises reaches the test, and the next job finds them well."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from shardfold.errors import RunError

from .ranks import Ranks


@pytest.fixture
def ranks(captures_folder: Path) -> Iterator[Ranks]:
    made = Ranks(captures_folder)
    yield made
    made.stop()


def process(rank: int) -> tuple[int, int]:
    return os.getpid(), dist.get_world_size()


def refuses(rank: int) -> None:
    raise RunError("not like this")


def breaks(rank: int) -> None:
    if rank == 1:
        raise ValueError("odd")
    dist.barrier()


def ends(rank: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.barrier()


def crashes(rank: int, left: Path) -> int:
    if rank == 1 and left.exists():
        left.unlink()
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()
    return rank


def always_crashes(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def test_a_crash_is_told_and_tried_once_more(ranks: Ranks, tmp_path: Path) -> None:
    left = tmp_path / "once"
    left.touch()
    with pytest.warns(match=r"On rank 1 of 2:\nThe process ended with code -11[^\0]*in crashes"):
        assert ranks.run(crashes, 2, left) == [0, 1]
    with pytest.warns(match="once more"), pytest.raises(AssertionError, match="code -11"):
        ranks.run(always_crashes, 2)


def test_jobs_share_processes_also_after_a_refusal(ranks: Ranks) -> None:
    two = ranks.run(process, 2)
    with pytest.raises(RunError, match="not like this"):
        ranks.run(refuses, 2)
    three = ranks.run(process, 3)
    assert [size for _, size in two + three] == [2, 2, 3, 3, 3]
    assert [pid for pid, _ in two] == [pid for pid, _ in three[:2]]


@pytest.mark.parametrize(("job", "says"), [(breaks, "odd"), (ends, "The process ended")])
def test_an_error_names_its_rank_and_ends_the_others(ranks: Ranks, job, says: str) -> None:
    before = ranks.run(process, 2)
    with pytest.raises(AssertionError, match=rf"On rank 1 of 2:\n[^\0]*{says}"):
        ranks.run(job, 2)
    assert {pid for pid, _ in ranks.run(process, 2)}.isdisjoint(pid for pid, _ in before)
