"""Gradients of one parameter's uses, added up before they are reduced."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shardfold.calibrate.collectives import Rows, Way, _module, some_devices
from shardfold.errors import RunError
from shardfold.runtime.parameter_uses import Sum


def test_a_sum_is_whole_when_all_have_come() -> None:
    summed = Sum(3)
    assert [summed.add(torch.full((2,), float(k))) for k in (1, 2, 4)] == [False, False, True]
    assert summed.take().tolist() == [7.0, 7.0]
    assert (summed.count, summed.total) == (0, None)
    assert not summed.add(torch.ones(2))  # of a second forward in the same backward


def test_what_others_hold_is_not_written_to() -> None:
    held = torch.ones(4)
    summed = Sum(2)
    summed.add(held[:2])
    summed.add(torch.ones(2))
    assert summed.take().tolist() == [2.0, 2.0]
    assert held.tolist() == [1.0] * 4


@pytest.mark.parametrize("way", [Way(), Way(parts=1, again=True)])
def test_a_module_that_is_dropped_leaves_nothing_behind(way: Way) -> None:
    with some_devices():
        x = torch.randn(64, 16)
        module = _module(way, Rows(16, 3), x)
        module(x).backward()
        kept = [StorageWeakRef(p._local_tensor.untyped_storage()) for p in module.parameters()]
        assert not any(ref.expired() for ref in kept)
        del module
        gc.collect()
        assert all(ref.expired() for ref in kept)


def test_a_loss_whose_module_is_gone_says_so() -> None:
    with some_devices():
        x = torch.randn(64, 16)
        loss = _module(Way(), Rows(16, 3), x)(x)
        gc.collect()
        with pytest.raises(RunError, match="keep it until backward"):
            loss.backward()
