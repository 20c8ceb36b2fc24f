"""Parameters in parts are on their way as many readers ahead as the schedule says."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from shardfold.calibrate.sharing import Rows, Way, _module, some_devices
from shardfold.run.gathers import Promise


class Counted:
    """A gather that only counts."""

    def __init__(self, started: list[int], number: int) -> None:
        self.started, self.number = started, number

    def start(self, stored):
        self.started.append(self.number)
        return self.number

    def collect(self, stored, started):
        return stored


class Context:
    """What a promise asks of one."""

    def __init__(self, ahead: int) -> None:
        self.ahead, self.latest, self.traced = ahead, None, False


@pytest.mark.parametrize("ahead", [1, 3])
def test_backward_starts_the_gathers_before_the_one_it_asks_for(ahead):
    started: list[int] = []
    context, promises = Context(ahead), []
    for number in range(6):
        promise = Promise(Counted(started, number), torch.zeros(1), context)
        promise.made = 1
        promises.append(promise)
    promises[5].get()
    assert started == [4, 3, 2][:ahead]
    promises[4].get()
    promises[3].get()
    assert started == [4, 3, 2] + [1, 0] * (ahead == 3)  # each once


@pytest.mark.parametrize("ahead", [1, 3])
def test_forward_starts_as_many_readers_ahead(ahead):
    with some_devices():
        run = _module(Way(parts=1), Rows(16, 6), torch.randn(64, 16))._run
        run.lowered = replace(run.lowered, ahead=ahead)
        source = run._written(False, False).__doc__
    events = re.findall(r"(start|gathered)_(\d+)\(u", source)
    under_way, most = set(), 0
    for what, number in events:
        if what == "start":
            under_way.add(number)
            most = max(most, len(under_way))
        else:
            assert number in under_way  # none is asked for that was not begun
            under_way.remove(number)
    assert not under_way
    assert most == ahead + 1  # its own, and those ahead
