"""How fast the host is at the moment: what it takes to ask for a block of different operators."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from shardfold.calibrate.chains import LONG, MIXED, SHORT, chain
from shardfold.calibrate.stopwatch import Times, per_link, rounded, times_of
from shardfold.costs.profile import HostEntry

PACE = "pace"
ROUNDS = 7


class Pace:
    """Two chains of such blocks, as plain modules, to be timed again and again."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device = device
        with torch.device(device):
            self.chains = [chain(MIXED, count).to(dtype) for count in (SHORT, LONG)]

    def now(self) -> Times:
        """The host's seconds for a block, forward and backward."""
        short, long = (
            times_of(each, self.device, ROUNDS, partial(each.zero_grad, set_to_none=True))
            for each in self.chains
        )
        return per_link(short, long, LONG - SHORT)


def scaled(entries: Sequence[HostEntry], times: Sequence[float]) -> list[HostEntry]:
    """As much longer, forward and backward."""
    forward, backward = times
    return [
        HostEntry(
            entry.kind,
            rounded(entry.forward_seconds * forward),
            rounded(entry.backward_seconds * backward),
        )
        for entry in entries
    ]


def at_pace(entries: Sequence[HostEntry], pace: Times) -> tuple[HostEntry, ...]:
    """What was measured at one pace of the host, when it is at another."""
    known = next((entry for entry in entries if entry.kind == PACE), None)
    if known is None:
        return tuple(entries)
    then = known.forward_seconds, known.backward_seconds
    return tuple(scaled(entries, [a / b for a, b in zip(pace, then, strict=True)]))
