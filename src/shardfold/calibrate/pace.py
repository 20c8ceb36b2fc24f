"""How fast the host is at the moment: what it takes to ask for a block of different operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardfold.calibrate.chains import LONG, MIXED, SHORT, chain, module_of, per_link, timed
from shardfold.calibrate.stopwatch import Times, rounded
from shardfold.capture import capture_program
from shardfold.costs.profile import HostEntry

PACE = "pace"
ROUNDS = 5


class Pace:
    """A block of operators, captured without a device, to be timed on one again and again."""

    def __init__(self, dtype: torch.dtype) -> None:
        models = [chain(MIXED, count).to(dtype) for count in (SHORT, LONG)]
        self.captured = [(m, capture_program(m, (), {}, fold=False)) for m in models]
        self.modules: list[Any] = []

    def on(self, device: str) -> Pace:
        """Be ready to run on a device."""
        self.device = device
        self.modules = [module_of(model.to(device), program) for model, program in self.captured]
        return self

    def now(self) -> Times:
        """The host's seconds for a block, forward and backward."""
        short, long = (timed(module, self.device, ROUNDS) for module in self.modules)
        return per_link(short, long)


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
