"""Timers: host seconds of forward and backward, and device seconds without the launches.

On a GPU calls are queued: the device is first kept busy with a spin that outlasts the queueing,
so that the calls run back to back as in a step that keeps the device full; events around them
tell the time. On a CPU a call is done when it returns.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


SPIN_HERTZ = 2.0e9  # at least the clock of any GPU, so that a spin is never too short
LONGEST_SPIN_SECONDS = 0.05
Call = Callable[[], Any]


class Clock(Protocol):
    """Times calls on one device."""

    @property
    def device(self) -> str:
        """The kind of device."""
        ...

    def seconds(self, call: Call) -> float:
        """The device's seconds of one call."""
        ...


@dataclass(frozen=True, slots=True)
class CudaClock:
    """Events around queued calls."""

    device: str = "cuda"
    span_seconds: float = 2e-3  # of work in one timing, at least
    most: int = 20  # calls in one timing

    def seconds(self, call: Call) -> float:
        """The mean of calls that run back to back; the better of two timings."""
        call()
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        queued = time.perf_counter() - began
        torch.cuda.synchronize()
        once = time.perf_counter() - began
        count = max(2, min(self.most, int(self.span_seconds / max(once, 1e-6))))
        return min(self._queued(call, count, queued) for _ in range(2))

    def _queued(self, call: Call, count: int, queued: float) -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        spin = min(1.5 * queued * count + 1e-4, LONGEST_SPIN_SECONDS)
        torch.cuda._sleep(int(spin * SPIN_HERTZ))
        first.record()
        for _ in range(count):
            call()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) * 1e-3 / count


@dataclass(frozen=True, slots=True)
class CpuClock:
    """The processor's own time: a call is done when it returns."""

    device: str = "cpu"
    span_seconds: float = 8e-3
    rounds: int = 3

    def seconds(self, call: Call) -> float:
        """The median of a few rounds of calls."""
        call()
        began = time.perf_counter()
        call()
        once = time.perf_counter() - began
        count = max(1, min(200, int(self.span_seconds / max(once, 1e-7))))
        rounds = []
        for _ in range(self.rounds):
            began = time.perf_counter()
            for _ in range(count):
                call()
            rounds.append((time.perf_counter() - began) / count)
        return statistics.median(rounds)


def clock_of(device: str, processes: int = 1) -> Clock:
    """The clock of a kind of device; where processes wait for cores, one that looks for longer."""
    if device == "cuda":
        return CudaClock()
    waiting = processes * torch.get_num_threads() > (os.cpu_count() or 1)
    return CpuClock(span_seconds=4e-2) if waiting else CpuClock()
