"""Calibration on one process, on several started here, or on those that torchrun started.

Where processes share a machine they are measured side by side, so that a table holds what a kernel
takes while the others compute, too: each time is the median over the processes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch.distributed as dist

from shardfold.calibrate.calibrate import calibrate
from shardfold.costs.profile import HostEntry, Profile, Table, sealed
from shardfold.run.launch import is_started, joined, launch
from shardfold.stages import Stage

Watch = Callable[[Stage], None]


def calibrated(device: str, local: int | None, quick: bool, watch: Watch) -> Profile | None:
    """The profile, on rank 0; None on the other ranks of torchrun."""
    if local is not None:
        found: Profile = launch(_on_rank, local, device, quick)[0]
        return found
    if is_started():
        with joined() as (rank, _):
            shared = together(calibrate(device, quick=quick, watch=watch if not rank else _quiet))
            return shared if rank == 0 else None
    return calibrate(device, quick=quick, watch=watch)


def _quiet(stage: Stage) -> None:
    """A watch that looks away."""


def _on_rank(rank: int, device: str, quick: bool) -> Profile | None:
    found = together(calibrate(device, quick=quick))
    return found if rank == 0 else None


def together(profile: Profile) -> Profile:
    """The profile with the median of all processes in place of one's own times."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, profile)
    tables = tuple(_median(group) for group in zip(*[p.tables for p in everyone], strict=True))
    host = tuple(_median_host(group) for group in zip(*[p.host for p in everyone], strict=True))
    return sealed(msgspec.structs.replace(profile, tables=tables, host=host))


def _median_host(entries: Sequence[HostEntry]) -> HostEntry:
    return HostEntry(
        entries[0].kind,
        statistics.median(entry.forward_seconds for entry in entries),
        statistics.median(entry.backward_seconds for entry in entries),
    )


def _median(tables: Sequence[Table]) -> Table:
    columns = zip(*[table.seconds for table in tables], strict=True)
    times = tuple(
        None if None in column else statistics.median(t for t in column if t is not None)
        for column in columns
    )
    return msgspec.structs.replace(tables[0], seconds=times)
