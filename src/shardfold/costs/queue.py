"""A host that asks and a device that does: how long both take together.

The host asks for one operator after another, the device runs them in order:

    asked(i) = asked(i - 1) + host(i)
    done(i)  = max(done(i - 1), asked(i)) + device(i)

A step is over when both are. Where operators are short the host is the slower one, where they are
long it runs ahead. An operator inside which the host waits takes until the device has done all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
