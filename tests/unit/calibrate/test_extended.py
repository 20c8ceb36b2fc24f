"""A profile is extended by what it lacks, on its own machine, and by nothing else."""

import sys
from dataclasses import replace

import msgspec
import pytest

from shardfold.calibrate.grids import Grid, Plan
from shardfold.calibrate.host import added_entries
from shardfold.calibrate.kernels import measure
from shardfold.calibrate.profile import assembled, best_rates, extended, machine_of
from shardfold.calibrate.timers import CpuClock
from shardfold.costs.profile import HostEntry, sealed
from shardfold.errors import ProfileError

MODULE = sys.modules[extended.__module__]  # the package has a function of this name
HOST = sys.modules[added_entries.__module__]
CLOCK = CpuClock(span_seconds=1e-4, rounds=1)
KNOWN = Plan(
    (
        Grid("matmul.nt", "float32", ((8, 16), (8,), (8,))),
        Grid("vector", "float32", ((1 << 10, 1 << 12),)),
    ),
    1.0,
    {"float32": 1e9},
    1e9,
    1e6,
)
LACKING = Grid("split_norm.forward", "float32", ((2,), (4, 8), (4,)))


@pytest.fixture
def profile(monkeypatch):
    tables, probes = measure(KNOWN, CLOCK, lambda *_: None)
    assert best_rates(tables).bandwidth > 0
    whole = replace(KNOWN, grids=(*KNOWN.grids, LACKING))
    monkeypatch.setattr(MODULE, "cpu_plan", lambda quick: whole)
    monkeypatch.setattr(MODULE, "clock_of", lambda kind: CLOCK)
    monkeypatch.setattr(HOST, "_slower_here", lambda *_: (2.0, 3.0))
    given = [HostEntry("update", 1e-6, 1e-6), HostEntry("update.parts", 2e-6, 2e-6)]
    return assembled(machine_of("cpu"), tables, probes, given, ())


def test_only_what_is_lacking_is_measured(profile):
    found = extended(profile)
    assert found.tables[:2] == profile.tables
    assert [t.family for t in found.tables[2:]] == ["split_norm.forward"]
    assert found.host[:2] == profile.host
    experts = [f"shardfold.expert_linear{what}" for what in ("", ".each", ".sort")]
    assert [e.kind for e in found.host[2:]] == ["split_norm", *experts]
    assert "torch" in found.environment["extended"]
    assert found == sealed(found)
    assert extended(found) == found


def test_another_machine_is_refused(profile):
    elsewhere = msgspec.structs.replace(profile.machine, name="another processor")
    with pytest.raises(ProfileError, match="calibrate anew"):
        extended(sealed(msgspec.structs.replace(profile, machine=elsewhere)))


def test_the_host_is_measured_anew_where_that_is_asked_for(profile, monkeypatch):
    new = (HostEntry("update", 7e-6, 8e-6),)
    monkeypatch.setattr(MODULE, "host_entries", lambda *_: new)
    found = extended(profile, host_anew=True)
    assert found.host == new
    assert found.tables[:2] == profile.tables
    assert "extended" in found.environment
    assert found == sealed(found)
