"""What all ranks of a checkpoint do alike: one error ends it on all of them, none is left waiting.

One process needs no process group.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from shardfold.errors import CheckpointError, ShardfoldError

T = TypeVar("T")


def is_shared() -> bool:
    """Whether several processes take part."""
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def rank() -> int:
    """The number of this process."""
    return dist.get_rank() if is_shared() else 0


def on_first(function: Callable[[], T], patience: timedelta | None = None) -> T:
    """Rank 0's result, on every rank; its error is everyone's.

    With `patience` the others wait so long, not only as long as a collective may take. A rank that
    is killed is noticed at once all the same, as its connections close.
    """
    group = None
    if patience is not None and is_shared():
        group = dist.new_group(timeout=patience, backend="gloo")
    found: list[object] = [None, ""]
    if rank() == 0:
        try:
            found = [function(), ""]
        except (ShardfoldError, OSError) as error:
            if not is_shared():
                raise
            found = [None, str(error)]
    if is_shared():
        dist.broadcast_object_list(found, src=0, group=group)
    if group is not None:
        dist.destroy_process_group(group)
    if found[1]:
        raise CheckpointError(str(found[1]))
    return found[0]  # type: ignore[return-value]


def on_all(function: Callable[[], T]) -> T:
    """Each rank's own result; an error on any rank is everyone's."""
    result, failed = None, ""
    try:
        result = function()
    except (ShardfoldError, OSError) as error:
        if not is_shared():
            raise
        failed = str(error)
    if is_shared():
        told: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(told, failed)
        reasons = [reason for reason in (failed, *told) if reason]
        if reasons:
            raise CheckpointError(reasons[0])
    return result  # type: ignore[return-value]


@contextmanager
def said_plainly(what: str) -> Iterator[None]:
    """Errors of torch.distributed.checkpoint as ours, named by the first rank that had one."""
    log = logging.getLogger("torch.distributed.checkpoint")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")
            yield
    except CheckpointException as error:
        number, (reason, _) = min(error.failures.items())
        if isinstance(reason, CheckpointError):
            raise CheckpointError(str(reason)) from None
        if isinstance(reason, OSError):
            text = f"{reason.strerror} ({reason.filename or 'while writing'})"
            raise CheckpointError(f"{what} failed on rank {number}: {text}.") from None
        raise CheckpointError(f"{what} failed on rank {number}: {reason!r}.") from reason
    finally:
        log.setLevel(before)
