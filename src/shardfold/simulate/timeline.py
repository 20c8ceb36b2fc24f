"""What a simulated step comes to: figures, and a timeline of streams and of memory."""

from __future__ import annotations

import msgspec

from shardfold.simulate.schedule import Value


class Span(Value, frozen=True):
    """A task on a stream, from start to end; `exposed_seconds` is how long work waited for it."""

    stream: str
    operator: str
    block: str
    kind: str
    phase: str  # forward, backward or update
    start_seconds: float
    end_seconds: float
    exposed_seconds: float = 0.0
    bytes: float = 0.0


class Sample(Value, frozen=True):
    """The memory of a device from a moment on, by class."""

    seconds: float
    bytes: dict[str, float]

    @property
    def total(self) -> float:
        """Of all classes."""
        return sum(self.bytes.values())


class Timeline(Value, frozen=True):
    """Every span of a step in order of start, and its memory whenever that changes."""

    streams: tuple[str, ...]
    spans: tuple[Span, ...]
    memory: tuple[Sample, ...]


class Exposed(Value, frozen=True):
    """Collectives of one kind, phase and stream: how long they ran, how long work waited."""

    stream: str
    phase: str
    kind: str
    count: int
    seconds: float
    exposed_seconds: float


class Simulation(Value, frozen=True):
    """The figures of a step. `mfu`: useful FLOP over what the device could do in the time."""

    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    peak_bytes: float
    peak_by_class: dict[str, float]
    peak_at: str  # the operator and phase of the peak
    mfu: float
    utilisation: dict[str, float]  # per stream, the share of the step in which it is busy
    collectives: tuple[Exposed, ...] = ()
    peak_by_block: dict[str, float] = msgspec.field(
        default_factory=dict
    )  # what each segment holds at the peak
