"""The figures of a stated strategy: its step, its memory, and what communication it waits for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Communication:
    """Collectives of one kind: how long they run in a step, and how long work waits for them."""

    kind: str
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True, slots=True)
class EstimatedStage:
    """One part of the cluster: the layers that it has, and what it does."""

    layers: str
    forward_seconds: float  # of a micro-batch
    backward_seconds: float
    busy_seconds: float  # of a step
    in_flight: int  # the most micro-batches between forward and backward, of all its chunks
    peak_bytes: float


@dataclass(frozen=True, slots=True)
class Pipelined:
    """The stages of a pipeline; `bubble` is the share of the step in which they have no work."""

    schedule: str
    bubble: float
    stages: tuple[EstimatedStage, ...]


@dataclass(frozen=True, slots=True)
class Estimated:
    """The figures of a stated strategy on one cluster, per device where nothing else is said.

    `rate` is tokens or samples (`unit`) in a second over all devices. `hfu` counts recomputed
    work, `mfu` does not. `plan_seconds` and `plan_bytes` are of the plan beside it, if one was
    asked for and found. Of a pipeline, seconds of work and of communication are those of the mean
    device, the peak is that of the fullest stage.
    """

    strategy: str
    cluster: str
    devices: int
    mesh: str
    step_seconds: float
    compute_seconds: float
    rate: float
    unit: str
    mfu: float
    hfu: float
    peak_bytes: float
    peak_by_class: Mapping[str, float]
    limit_bytes: float
    communication: tuple[Communication, ...]
    plan_seconds: float | None = None
    plan_bytes: float | None = None
    pipeline: Pipelined | None = None
    step_range_seconds: tuple[float, float] | None = None  # where steps like it were measured

    @property
    def fits(self) -> bool:
        """Whether the peak is within the limit."""
        return self.peak_bytes <= self.limit_bytes

    @property
    def exposed_seconds(self) -> float:
        """How long work waits for communication."""
        return sum(each.exposed_seconds for each in self.communication)

    @property
    def rate_per_device(self) -> float:
        """Tokens or samples in a second, of one device."""
        return self.rate / self.devices

    def as_plain(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        plain = asdict(self)
        return {
            **plain,
            "peak_by_class": dict(self.peak_by_class),
            "rate_per_device": self.rate_per_device,
            "exposed_seconds": self.exposed_seconds,
            "fits": self.fits,
        }
