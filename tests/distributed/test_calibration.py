"""Calibration on processes side by side: every collective on every group size, one profile."""

from __future__ import annotations

import pytest

from shardfold.calibrate import collectives
from shardfold.calibrate.collectives import collective_entries
from shardfold.calibrate.profile import assembled, machine_of, together
from shardfold.costs.profile import HostEntry, Profile, Table, loads
from shardfold.costs.profile import dumps as written

from .ranks import Launch


def job(rank: int) -> str:
    """A profile in which every process measured something else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "SIZES", (1024.0, 4096.0))
        patch.setattr(collectives, "ROUNDS", 2)
        entries = collective_entries("cpu", lambda *_: None)
    tables = (
        Table("matmul.nt", "float32", ((8.0,), (8.0,), (8.0,)), (1.0 + rank,)),
        Table("vector", "float32", ((1024.0,),), (1e-6,)),
    )
    host = (HostEntry("update", 1.0 + rank, 3.0),)
    return written(together(assembled(machine_of("cpu"), tables, {}, host, entries)))


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_make_one_profile(processes: int, on_ranks: Launch) -> None:
    found = on_ranks(job, processes)
    assert len(set(map(_tables, found))) == 1  # all agree on the tables
    profile = loads(found[0].encode())
    middle = 1.0 + (processes - 1) / 2
    assert profile.machine.processes == processes
    assert profile.tables[0].seconds == (middle,)
    assert profile.host == (HostEntry("update", middle, 3.0),)
    sizes = [2] if processes == 2 else [2, 4]
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    assert [(e.kind, e.size, e.groups) for e in profile.collectives] == [
        (kind, size, processes // size) for size in sizes for kind in kinds
    ]
    assert all(s > 0 for e in profile.collectives for s in e.seconds)


def _tables(text: str) -> object:
    profile: Profile = loads(text.encode())
    return profile.tables
