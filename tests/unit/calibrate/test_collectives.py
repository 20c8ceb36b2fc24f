"""What the host takes for collectives and for experts, measured on the runner's own path."""

import pytest
import torch
import torch.distributed as dist

from shardfold.calibrate import collectives, host
from shardfold.calibrate.collectives import SHARING, Rows, Way, sharing_entries, some_devices
from shardfold.calibrate.host import _experts, added_entries


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(collectives, "BUCKET_BYTES", 1 << 10)
    monkeypatch.setattr(collectives, "NARROW", 8)
    monkeypatch.setattr(collectives, "FEW", 1)
    monkeypatch.setattr(collectives, "MANY", 3)


def test_every_collective_has_an_entry_and_the_group_is_gone():
    entries = {entry.kind: entry for entry in sharing_entries("cpu", torch.float32)}
    assert tuple(entries) == SHARING
    assert all(entry.forward_seconds >= 0 for entry in entries.values())
    assert not dist.is_initialized()


def test_a_collective_takes_what_its_way_takes_beyond_another(monkeypatch):
    known = {
        Way(is_shared=False): (10.0, 20.0),
        Way(): (10.5, 23.0),
        Way(parts=1): (14.0, 25.0),
        Way(parts=1, again=True): (15.0, 31.0),
        Way(parts=2): (15.5, 27.0),
        Way(parts=2, again=True): (16.5, 34.0),
    }
    monkeypatch.setattr(collectives, "_layers", lambda ways, *_: [known[way] for way in ways])
    found = {
        e.kind: (e.forward_seconds, e.backward_seconds)
        for e in sharing_entries("cpu", torch.float32)
    }
    assert found == {
        "all_gather": (4.0, 7.0),  # a second gather is begun in forward, and ends in backward
        "all_reduce": (3.0, 3.0),
        "reduce_scatter": (5.0, 5.0),
        "all_gather.shared": (4.0, 7.0),
        "all_reduce.shared": (3.0, 3.0),
        "reduce_scatter.shared": (5.0, 5.0),
        "all_gather.more": (1.5, 1.0),
        "reduce_scatter.more": (2.0, 2.0),
    }


@pytest.mark.parametrize(
    ("way", "gathers", "again"),
    [(Way(), 0, 0), (Way(parts=1), 3, 0), (Way(parts=1, again=True), 3, 2), (Way(parts=2), 6, 0)],
)
def test_a_way_gathers_what_it_says(way, gathers, again):
    # The first layer passes no gradient on: its weight is not needed again.
    with some_devices():
        model, x = Rows(16, 3), torch.randn(64, 16)
        run = collectives._module(way, model, x)._run
    feeds = [f for i in run.lowered.instructions for f in i.feeds if f.back is not None]
    of_parameters = [f for f in feeds if f.tensor in run.by_tensor]
    assert sum(len(f.there.steps) for f in of_parameters) == gathers
    assert sum(f.regathers for f in of_parameters) == again
    kinds = {step.kind for f in of_parameters for step in f.back.steps}
    assert kinds == ({"reduce_scatter"} if way.parts else {"all_reduce"})


def test_experts_have_a_call_one_expert_more_and_their_sort():
    once, each, sort = _experts("cpu", torch.float32)
    kinds = [f"shardfold.expert_linear{what}" for what in ("", ".each", ".sort")]
    assert [entry.kind for entry in (once, each, sort)] == kinds
    assert max(once.forward_seconds, each.forward_seconds) > 0  # either, on a busy machine
    assert sort.forward_seconds > 0


def test_collectives_of_a_cpu_are_not_asked_for(monkeypatch):
    monkeypatch.setattr(host, "_slower_here", lambda *_: (1.0, 1.0))
    experts = [f"shardfold.expert_linear{what}" for what in ("", ".each", ".sort")]
    known = {"update", "update.parts", "split_norm", experts[0]}
    found = added_entries("cpu", torch.float32, known)
    assert [entry.kind for entry in found] == experts[1:]
