"""Gradients of one parameter's uses, added up before they are reduced."""

from __future__ import annotations

import torch

from shardfold.run.uses import Sum


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
