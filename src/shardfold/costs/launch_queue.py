"""The launch queue of a GPU: how long the launching host and the running device take together.

The host asks for one operator after another, the device runs them in order:

    asked(i) = asked(i - 1) + host(i)
    done(i)  = max(done(i - 1), asked(i)) + device(i)

A step is over when both are. Where operators are short the host is the slower one, where they are
long it runs ahead. An operator inside which the host waits takes until the device has done all.

A step of a plan as the host asks for it and the device does it, for the queue of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from shardfold.costs.models.measured import Measured, is_in_calls
from shardfold.costs.steps import Collective, Step


@dataclass(frozen=True, slots=True)
class Asked:
    """One operator's pass: the host's seconds, the device's, and whether the host waits."""

    host_seconds: float
    device_seconds: float
    waits: bool = False


def queued_seconds(asked: Iterable[Asked]) -> float:
    """The seconds until host and device are done with everything."""
    host = device = 0.0
    for one in asked:
        if one.waits:
            host = device = max(host, device) + one.device_seconds
            continue
        host += one.host_seconds
        device = max(device, host) + one.device_seconds
    return max(host, device)


def asked_for(step: Step, model: Measured) -> Iterator[Asked]:
    """One case of a step. Of a collective only the packing, not the sending.

    An operator is asked for at once, unless it is one of many calls: then each of its kernels is
    asked for by itself, and the host may wait for one.
    """
    if isinstance(step, Collective):
        host, device = model.packing(step)
        yield Asked(host, float(device[0]) * step.repeats)
        return
    if step.work is None or not is_in_calls(step):
        yield Asked(float(model.host_seconds(step)[0]), float(model.device_seconds(step)[0]))
        return
    for kernel, host in model.calls_of(step, step.work.kernels(step.phase)):
        device_seconds = float(model.kernel_seconds(kernel)[0])
        times = round(float(np.broadcast_to(kernel.times, (1,))[0]))
        if kernel.is_awaited:
            yield Asked(times * host, 0.0)
            yield Asked(0.0, times * device_seconds, waits=True)
        else:
            yield from [Asked(host, device_seconds)] * times
