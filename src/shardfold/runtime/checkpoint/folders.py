"""Folders of checkpoints: a name for each, made whole or not at all, the oldest removed.

A checkpoint is written into a hidden folder and renamed when every byte is on the disk, so that a
crash at any moment leaves the one before. A step that is saved again gets a new name beside the
old one: at no moment is there none.

    run/step-00000020  run/step-00000030  run/step-00000030-1  run/.step-00000040.partial

What all ranks of a checkpoint do alike: one error ends it on all of them, none is left waiting.

One process needs no process group.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from shardfold.errors import CheckpointError, ShardfoldError
from shardfold.runtime.checkpoint.index import FILE

NAME = re.compile(r"step-([0-9]{8,})(?:-([0-9]+))?")
PARTIAL = ".partial"
REMOVED = ".removed"


def listed(root: Path) -> list[Path]:
    """The complete checkpoints in `root`, oldest step first."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_order)


def latest(root: Path) -> Path | None:
    """The checkpoint of the last step in `root`, if there is any."""
    found = listed(root)
    return found[-1] if found else None


def resolve(path: Path) -> Path:
    """The checkpoint that a user means: the folder itself, or the last one in it."""
    if (path / FILE).is_file():
        return path
    found = latest(path)
    if found is None:
        what = "has no checkpoint in it" if path.is_dir() else "does not exist"
        raise CheckpointError(f"{path} {what}: save one with sf.save, or check the path.")
    return found


def begin(root: Path, step: int) -> Path:
    """An empty hidden folder for a new checkpoint; what earlier crashes left is removed."""
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(".step-*"):
        if left.name.endswith((PARTIAL, REMOVED)):
            shutil.rmtree(left)
    folder = root / f".{_free_name(root, step)}{PARTIAL}"
    folder.mkdir()
    return folder


def commit(folder: Path) -> Path:
    """Rename a folder that is on the disk to what it is; this is the moment it exists."""
    final = folder.with_name(folder.name.removeprefix(".").removesuffix(PARTIAL))
    sync_folder(folder)
    folder.rename(final)
    sync_folder(final.parent)
    return final


def abandon(folder: Path) -> None:
    """Remove what was written of a checkpoint that came to nothing."""
    shutil.rmtree(folder, ignore_errors=True)


def prune(root: Path, keep: int) -> None:
    """Remove all but the last `keep` checkpoints."""
    for old in listed(root)[:-keep]:
        # Hidden first, so that one half removed is never taken for a whole one.
        hidden = old.with_name(f".{old.name}{REMOVED}")
        old.rename(hidden)
        shutil.rmtree(hidden)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _order(path: Path) -> tuple[int, int]:
    match = NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _free_name(root: Path, step: int) -> str:
    taken = {path.name for path in root.iterdir()}
    return next(name for name in _names(step) if name not in taken)


def _names(step: int) -> Iterator[str]:
    yield f"step-{step:08d}"
    number = 0
    while True:
        number += 1
        yield f"step-{step:08d}-{number}"


T = TypeVar("T")


def is_shared() -> bool:
    """Whether several processes take part."""
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def rank() -> int:
    """The number of this process."""
    return dist.get_rank() if is_shared() else 0


def rank_of() -> tuple[int, int]:
    """The number of this process, and how many there are."""
    return rank(), dist.get_world_size() if is_shared() else 1


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
