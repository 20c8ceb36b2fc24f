"""The host's pace, and what was measured at another."""

from __future__ import annotations

import pytest
import torch

import shardfold as sf
from shardfold.calibrate import host
from shardfold.calibrate.host import IN_MIXED, Pace, at_pace, pace_by
from shardfold.costs.by_kernel import HOST
from shardfold.costs.profile import HostEntry


def test_a_block_takes_some_time():
    pace = Pace("cpu", torch.float32)
    assert min(max(side) for side in zip(*[pace.now() for _ in range(3)], strict=True)) > 0


def test_what_was_measured_at_one_pace_is_told_at_another():
    entries = [HostEntry("aten.add", 1e-6, 2e-6), HostEntry("pace", 1e-4, 2e-4)]
    slow = at_pace(entries, (3e-4, 1e-4))
    assert slow == (HostEntry("aten.add", 3e-6, 1e-6), HostEntry("pace", 3e-4, 1e-4))
    assert at_pace(entries[:1], (3e-4, 1e-4)) == (entries[0],)  # of a profile without one


def test_all_entries_are_of_one_pace(monkeypatch):
    """The host is twice as slow from some moment on: what is measured then is halved."""
    slowness = {"now": 1.0}
    kinds = ("aten.add", "aten.mul", "aten.gelu")

    class Known:
        def __init__(self, device, dtype):
            pass

        def now(self):
            return 1e-4 * slowness["now"], 2e-4 * slowness["now"]

    def slope(kind, device, dtype):
        found = 1e-5 * slowness["now"], 2e-5 * slowness["now"]
        if kind == "aten.mul":
            slowness["now"] = 2.0
        return [10 * f for f in found] if kind == "mixed" else found

    monkeypatch.setattr(host, "Pace", Known)
    monkeypatch.setattr(host, "LINKS", dict.fromkeys(kinds))
    monkeypatch.setattr(host, "IN_MIXED", {"aten.add": 1})
    monkeypatch.setattr(host, "slope", slope)
    monkeypatch.setattr(host, "times", lambda *_: (3e-5 * slowness["now"],) * 2)
    taken = host._one("update", lambda *_: (4e-5 * slowness["now"],) * 2)
    monkeypatch.setattr(host, "BESIDE", {("update",): taken})
    found = {e.kind: e for e in host.host_entries("cpu", torch.float32, lambda *_: None)}
    assert tuple(found) == (*kinds, "step", "update", "pace")
    here = found["pace"].forward_seconds / 1e-4
    assert found["step"].forward_seconds == pytest.approx(3e-5 * here)
    assert found["update"].forward_seconds == pytest.approx(4e-5 * here)
    # A chain's operator takes a tenth of a block: as much longer among others.
    assert found["aten.add"].forward_seconds == pytest.approx(1e-5 * here * 10)
    assert found["aten.gelu"].backward_seconds == pytest.approx(2e-5 * here * 10)


def test_the_pace_is_that_of_the_default_host_where_a_block_takes_its_times() -> None:
    block = [sum(n * HOST[kind][side] * 1e-6 for kind, n in IN_MIXED.items()) for side in (0, 1)]
    assert pace_by((block[0], block[1])) == pytest.approx(1.0)
    assert pace_by((block[0] / 2, block[1] / 2)) == pytest.approx(0.5)


def test_a_slow_host_makes_a_step_of_small_operators_long() -> None:
    model, x = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(8))), torch.randn(8, 8)
    step = [
        sf.Planner(model, (x,), cluster="1xh200", loss=lambda y: y.mean(), host_pace=pace)
        .estimate("dp=1", beside_plan=False)
        .step_seconds
        for pace in (None, 1.0, 2.0)
    ]
    assert step[0] == step[1]
    assert step[2] == pytest.approx(2 * step[0], rel=0.1)
