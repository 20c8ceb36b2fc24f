"""The batch in parts: a range of samples for every rank, together all of them."""

from __future__ import annotations

from collections import UserDict, namedtuple

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.errors import RunError
from shardfold.plans import Plan
from shardfold.plans.batch import part_of


@pytest.fixture(scope="module")
def plan() -> Plan:
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3)))
    x = torch.empty(1 << 16, 6, device="meta")
    return sf.plan(model, (x,), cluster="4xcpu", mesh="2x2", loss=lambda y: y.square().mean())


def of(plan: Plan, samples: int, layout: tuple[str, ...]) -> Plan:
    entry = msgspec.structs.replace(plan.inputs[0], shape=(samples, 6), layout=layout)
    return msgspec.structs.replace(plan, inputs=(entry,))


def test_a_large_batch_is_read_in_parts(plan: Plan) -> None:
    (entry,) = plan.inputs
    assert entry.shape == (1 << 16, 6)
    assert entry.layout == ("dim 0", "dim 0")
    assert [part_of(plan, rank) for rank in range(4)] == [
        (k << 14, (k + 1) << 14) for k in range(4)
    ]


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        (("dim 0", "dim 0"), [(0, 3), (3, 5), (5, 8), (8, 10)]),
        (("dim 0", "replicated"), [(0, 5), (0, 5), (5, 10), (5, 10)]),
        (("replicated", "dim 0"), [(0, 5), (5, 10), (0, 5), (5, 10)]),
        (("replicated", "replicated"), [(0, 10)] * 4),
    ],
)
def test_parts_of_ten(plan: Plan, layout: tuple[str, ...], parts: list[tuple[int, int]]) -> None:
    ten = of(plan, 10, layout)
    assert [part_of(ten, rank) for rank in range(4)] == parts
    batch = {"x": np.arange(60).reshape(10, 6), "n": 3}
    for rank, (low, high) in enumerate(parts):
        found = ten.local_batch([batch], rank=rank)[0]
        assert found["n"] == 3
        assert (found["x"] == batch["x"][low:high]).all()
    for epoch in range(3):
        steps = []
        for rank in range(4):
            sampler = ten.sampler(34, seed=1, rank=rank)
            sampler.set_epoch(epoch)
            assert len(sampler) == 3
            steps.append(list(sampler))
            assert steps[-1] == [sampler.batch(3 * epoch + k) for k in range(3)]
        distinct = [rank for rank in range(4) if parts[rank] not in parts[:rank]]
        seen = [i for k in range(3) for rank in distinct for i in steps[rank][k]]
        assert len(set(seen)) == len(seen) == 30
        assert set(seen) <= set(range(34))


def test_batches_of_any_shape_are_cut(plan: Plan) -> None:
    pair = namedtuple("pair", "x y")(np.ones((10, 6)), None)
    ten = of(plan, 10, ("dim 0", "dim 0"))
    found = ten.local_batch((pair, UserDict(x=[pair.x])), rank=0)
    assert found[0].x.shape == found[1]["x"][0].shape == (3, 6)
    assert found[0].y is None


def test_epochs_differ_and_order_can_be_kept(plan: Plan) -> None:
    ten = of(plan, 10, ("dim 0", "dim 0"))
    sampler = ten.sampler(list(range(20)), rank=0)
    assert sampler.batch(0) != sampler.batch(2)
    plain = ten.sampler(20, shuffle=False, rank=2)
    assert list(plain) == [[5, 6, 7], [15, 16, 17]]


def test_what_does_not_fit_is_refused(plan: Plan) -> None:
    ten = of(plan, 10, ("dim 0", "dim 0"))
    with pytest.raises(RunError, match=r"shape \(9, 6\), the plan is for \(10, 6\)"):
        ten.local_batch(np.zeros((9, 6)), rank=0)
    with pytest.raises(RunError, match="The batch has a set"):
        ten.local_batch({1, 2}, rank=0)
    with pytest.raises(RunError, match="The data has 9 samples, one batch of the plan 10"):
        ten.sampler(9, rank=0)
    with pytest.raises(RunError, match="No process group is initialised"):
        ten.sampler(20)


def test_micro_batches_are_shared_out_one_by_one(plan: Plan) -> None:
    """Every rank has its part of each micro-batch, and all ranks together have all of it."""
    four = of(plan, 10, ("dim 0", "dim 0"))
    entry = msgspec.structs.replace(four.inputs[0], cut=0, place="0")
    cut = msgspec.structs.replace(four, inputs=(entry,), micro_batches=3)
    x = np.arange(30 * 6).reshape(30, 6)
    samplers = [cut.sampler(60, shuffle=False, rank=rank) for rank in range(4)]
    for rank, sampler in enumerate(samplers):
        rows = sampler.batch(0)
        assert (cut.local_batch(x, rank=rank) == x[rows]).all()
        assert sampler.batch(1) == [30 + row for row in rows]
    rows = [np.reshape(sampler.batch(0), (3, -1)) for sampler in samplers]
    for number in range(3):
        seen = [row for each in rows for row in each[number]]
        assert seen == list(range(10 * number, 10 * number + 10))


def rows(batches: list[torch.Tensor]) -> list[list[int]]:
    return [batch[:, 0].int().tolist() for batch in batches]


def test_a_loader_goes_on_where_it_was(plan: Plan) -> None:
    ten, data = of(plan, 10, ("dim 0", "dim 0")), torch.arange(34.0).view(-1, 1).repeat(1, 6)
    sampler = ten.sampler(data, seed=1, rank=2)
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
    whole = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        whole += rows(list(loader))
    assert len(whole) == 6
    sampler.set_step(2)
    assert rows(list(loader)) == whole[2:3]
    sampler.set_step(4)
    assert rows(list(loader)) == whole[4:]
    sampler.set_step(4)
    sampler.set_epoch(1)  # as a loop over the epochs that are left does
    assert rows(list(loader)) == whole[4:]
    sampler.set_epoch(1)
    assert rows(list(loader)) == whole[3:]
    sampler.set_epoch(0)
    assert rows(list(loader)) == whole[:3]


def test_a_stateful_loader_goes_on_where_it_was(plan: Plan) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")
    ten, data = of(plan, 10, ("dim 0", "dim 0")), torch.arange(54.0).view(-1, 1).repeat(1, 6)

    def loader() -> object:
        sampler = ten.sampler(data, seed=1, rank=1)
        sampler.set_epoch(3)
        return loaders.StatefulDataLoader(data, batch_sampler=sampler)

    first = loader()
    batches = iter(first)
    begun = [next(batches), next(batches)]
    state = first.state_dict()
    again = loader()
    again.load_state_dict(state)
    assert rows(list(again)) == rows(list(batches))
    assert rows(begun) == [ten.sampler(54, seed=1, rank=1).batch(3 * 5 + k) for k in range(2)]


def test_datasets_with_a_length_and_as_streams(plan: Plan) -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    ten = of(plan, 10, ("dim 0", "dim 0"))
    data = datasets.Dataset.from_dict({"x": [[float(k)] * 6 for k in range(34)]})
    data = data.with_format("torch")
    parts = []
    for rank in range(4):
        sampler = ten.sampler(data, shuffle=False, rank=rank)
        loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
        parts.append(rows([batch["x"] for batch in loader]))
        stream = data.to_iterable_dataset().batch(10, drop_last_batch=True).with_format("torch")
        batches = iter(stream)
        taken = [ten.local_batch(next(batches), rank=rank)["x"]]
        state = stream.state_dict()
        stream.load_state_dict(state)
        taken += [ten.local_batch(batch, rank=rank)["x"] for batch in stream]
        assert rows(taken) == parts[rank]
    whole = [[row for part in parts for row in part[step]] for step in range(3)]
    assert whole == [list(range(10 * step, 10 * step + 10)) for step in range(3)]
