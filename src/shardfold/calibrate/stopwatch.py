"""Seconds that the host takes for a forward, and for its backward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Times = tuple[float, float]  # forward, backward


def times_of(
    forward: Callable[[], Tensor],
    device: str,
    rounds: int,
    after: Callable[[], None] = lambda: None,
) -> Times:
    """The median of several: until forward has been asked for, and until backward is done."""
    forwards, backwards = [], []
    for _ in range(rounds):
        wait(device)
        began = time.perf_counter()
        found = forward()
        forwards.append(time.perf_counter() - began)
        loss = found.sum() if found.dim() else found
        wait(device)
        began = time.perf_counter()
        loss.backward()
        wait(device)
        backwards.append(time.perf_counter() - began)
        after()
    return middle(list(zip(forwards, backwards, strict=True)))


def wait(device: str) -> None:
    """Until the device has done what it was asked for."""
    if device == "cuda":
        torch.cuda.synchronize()


def per_link(short: Times, long: Times, more: int) -> Times:
    """What one more link takes, by the times of two chains of which one has so many more."""
    return (long[0] - short[0]) / more, (long[1] - short[1]) / more


def middle(times: Sequence[Times]) -> Times:
    """The median of each side."""
    forwards, backwards = zip(*times, strict=True)
    return statistics.median(forwards), statistics.median(backwards)


def rounded(seconds: float) -> float:
    """To three digits; a difference below zero is nothing.

    >>> rounded(0.00012345), rounded(-1e-6)
    (0.000123, 0.0)
    """
    return float(f"{max(0.0, seconds):.3g}")
