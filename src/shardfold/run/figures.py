"""A run in figures: how the loss went, how long a step took, and how well the devices were used."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardfold.cluster import from_plain
from shardfold.costs.ideal import ideal_seconds, model_flops
from shardfold.graph import Graph
from shardfold.plans import Plan
from shardfold.run.train import Batch, StepReport
from shardfold.spaces import atomise, rules_of


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run came to; `mfu` is the share of all devices' peak that the model's work takes."""

    steps: int
    first_loss: float
    last_loss: float
    step_seconds: float  # the median, without the first
    samples_per_second: float
    tokens_per_second: float | None
    model_flops: float
    mfu: float
    devices: int

    def __str__(self) -> str:
        rate = f"{self.samples_per_second:,.0f} samples/s"
        if self.tokens_per_second is not None:
            rate = f"{self.tokens_per_second:,.0f} tokens/s"
        return (
            f"{self.steps} steps: loss {self.first_loss:.4f} -> {self.last_loss:.4f}, "
            f"{self.step_seconds * 1e3:.1f} ms a step (median), {rate}, MFU {self.mfu:.1%}"
        )


def figures(plan: Plan, graph: Graph, reports: Sequence[StepReport], example: Batch) -> Figures:
    """The figures of some steps: the graph's own work, against the peak of the plan's device."""
    seconds = statistics.median([r.seconds for r in reports[1:] or reports])
    devices = math.prod(axis.size for axis in plan.mesh)
    atoms = atomise(graph, rules_of(graph))
    ideal = ideal_seconds(graph, atoms, from_plain(dict(plan.provenance.cluster)).device)
    samples, tokens = _sizes([*example[0], *example[1].values()])
    return Figures(
        steps=len(reports),
        first_loss=reports[0].loss,
        last_loss=reports[-1].loss,
        step_seconds=seconds,
        samples_per_second=samples / seconds,
        tokens_per_second=None if tokens is None else tokens / seconds,
        model_flops=model_flops(graph, atoms) * plan.micro_batches,
        mfu=plan.micro_batches * ideal / (devices * seconds),
        devices=devices,
    )


def _sizes(values: Sequence[Any]) -> tuple[int, int | None]:
    """Samples in the batch, and tokens where the first tensor holds whole numbers."""
    first = next((v for v in values if isinstance(v, Tensor) and v.dim()), None)
    if first is None:
        return 1, None
    return int(first.shape[0]), None if first.is_floating_point() else first.numel()
