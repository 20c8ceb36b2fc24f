"""A step of a plan as the host asks for it and the device does it, for the queue of both."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardfold.costs.kernels import kernels_of
from shardfold.costs.measured import Measured, is_in_calls
from shardfold.costs.queue import Asked
from shardfold.costs.steps import Collective, Step


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
    for kernel, host in model.calls_of(step, kernels_of(step.work, step.phase)):
        device_seconds = float(model.kernel_seconds(kernel)[0])
        times = round(float(np.broadcast_to(kernel.times, (1,))[0]))
        if kernel.is_awaited:
            yield Asked(times * host, 0.0)
            yield Asked(0.0, times * device_seconds, waits=True)
        else:
            yield from [Asked(host, device_seconds)] * times
