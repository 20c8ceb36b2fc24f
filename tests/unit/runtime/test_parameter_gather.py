"""Parameters in parts are on their way as many readers ahead as the schedule says."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from shardfold.calibrate.collectives import Rows, Way, _module, some_devices
from shardfold.runtime import parameter_gather
from shardfold.runtime.parameter_gather import Gather, Promise
from shardfold.runtime.process_groups import Groups


class Counted:
    """A gather that only counts."""

    def __init__(self, started: list[int], number: int) -> None:
        self.started, self.number = started, number

    def start(self, numbers):
        assert numbers == (0,)
        self.started.append(self.number)

    def collect(self, number, coming):
        return torch.zeros(1)


class Context:
    """What a promise asks of one."""

    def __init__(self, ahead: int) -> None:
        self.ahead, self.latest, self.traced = ahead, None, False


@pytest.mark.parametrize("ahead", [1, 3])
def test_backward_starts_the_gathers_before_the_one_it_asks_for(ahead):
    started: list[int] = []
    context, promises = Context(ahead), []
    for number in range(6):
        promise = Promise(Counted(started, number), context)
        promise.make(0)
        promises.append(promise)
    promises[5].get(0)
    assert started == [5, 4, 3, 2][: ahead + 1]
    promises[4].get(0)
    promises[3].get(0)
    assert started == [5, 4, 3, 2] + [1, 0] * (ahead == 3)  # each once


@pytest.mark.parametrize("ahead", [1, 3])
def test_forward_starts_as_many_readers_ahead(ahead):
    with some_devices():
        run = _module(Way(parts=1), Rows(16, 6), torch.randn(64, 16))._run
        run.lowered = replace(run.lowered, ahead=ahead)
        source = run.generated_code()
    events = re.findall(r"(start|gathered)_(\d+)\(", source)
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


def joints(module, x):
    """The numbers of the uses in each joint, in the order in which they are begun."""
    module(x)
    found = dict.fromkeys(module._run.uses.joints.values())
    return [tuple(joint.members) for joint in found]


def test_small_parameters_share_a_gather_and_large_ones_go_alone(monkeypatch):
    with some_devices():
        x = torch.randn(64, 16)
        module = _module(Way(parts=1, again=True), Rows(16, 6), x)
        assert joints(module, x) == [(0, 1, 2, 3, 4, 5)]
        ran = calls_of_a_step(monkeypatch, module, x)
        size = 16 * 16 * 4
        assert ran == [6 * size, 5 * size]  # the first layer's is not needed in backward
        assert [each.bytes for each in module._run.uses.joined] == ran
        monkeypatch.setattr(parameter_gather, "BUCKET_BYTES", 2 * size)
        module = _module(Way(parts=1), Rows(16, 5), x)
        assert joints(module, x) == [(0, 1), (2, 3), (4,)]
        monkeypatch.setattr(parameter_gather, "BUCKET_BYTES", size)
        module = _module(Way(parts=1), Rows(16, 3), x)
        assert joints(module, x) == [(0,), (1,), (2,)]


def test_what_is_in_parts_of_two_dims_is_one_gather_over_links_of_one_level(monkeypatch):
    with some_devices():
        x = torch.randn(64, 16)
        module = _module(Way(parts=2), Rows(16, 3), x)
        uses = module._run.uses
        assert len(calls_of_a_step(monkeypatch, module, x)) == 1
        (told,) = uses.joined
        assert told.axes == (0, 1)
        size = 16 * 16 * 4
        assert told.members == (((0,), size // 4), ((1,), size)) * 3
        apart = [Gather(g.moves, uses.groups, levels=(0, 1)) for g in uses.gathers.values()]
        assert not any(gather.can_start for gather in apart)


def calls_of_a_step(monkeypatch, module, x):
    """The bytes of each gather that a step starts."""
    ran, start = [], Groups.start_gather

    def noted(self, tensor, axes, members, **given):
        ran.append(members * tensor.numel() * tensor.element_size())
        return start(self, tensor, axes, members, **given)

    with monkeypatch.context() as patch:
        patch.setattr(Groups, "start_gather", noted)
        module(x).backward()
    return ran
