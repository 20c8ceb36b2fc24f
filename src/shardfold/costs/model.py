"""A cost model prices steps; two stand behind one interface.

`Roofline` is the default: a kernel takes the longer of its arithmetic and its memory traffic,
at the fractions of peak that the device reaches; a collective takes latency and bandwidth of the
links it crosses, level by level. `Paper` is equation 1 of PaSE (Elango, IPDPS 2021): arithmetic
at peak rate, bytes at one average bandwidth, no latency, no memory traffic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shardfold.cluster import Cluster, Mesh
from shardfold.costs.steps import Collective, Compute, Steps, Values
from shardfold.errors import InputError, nearest


class CostModel(Protocol):
    """Turns steps into seconds. Must be pure: the same step always costs the same."""

    def compute_seconds(self, step: Compute) -> Values:
        """Seconds of local work, for each case."""
        ...

    def collective_seconds(self, step: Collective) -> Values:
        """Seconds of one collective, for each of its rows."""
        ...


def price(steps: Steps, model: CostModel) -> Values:
    """Seconds of each case: the sum over its steps."""
    total = np.zeros(steps.cases)
    for step in steps.steps:
        if isinstance(step, Compute):
            total += model.compute_seconds(step)
        elif step.kind != "slice":
            total[step.rows] += model.collective_seconds(step) * step.repeats
    return total


# What one device sends in a collective over n, as a multiple of the step's bytes; and how many
# messages follow one another.
VOLUME: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2.0 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "halo": lambda n: 1.0,
}
ROUNDS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2.0 * math.ceil(math.log2(n)),
    "all_gather": lambda n: math.ceil(math.log2(n)),
    "reduce_scatter": lambda n: math.ceil(math.log2(n)),
    "all_to_all": lambda n: n - 1.0,
    "halo": lambda n: 1.0,
}


@dataclass(frozen=True, slots=True)
class Roofline:
    """Peak rates with efficiencies, memory traffic, latency and bandwidth per link level."""

    cluster: Cluster
    mesh: Mesh

    def compute_seconds(self, step: Compute) -> Values:
        """The longer of arithmetic and memory traffic, and the launch of each kernel."""
        device = self.cluster.device
        if step.engine == "matrix":
            rate = device.peak(step.dtype) * device.matmul_efficiency
        else:
            rate = max(flops for name, flops in device.peak_flops if name in ("float32", "float64"))
        moved = device.memory_bandwidth * device.memory_efficiency
        return np.maximum(step.flops / rate, step.bytes / moved) + device.launch_seconds * step.kernels

    def collective_seconds(self, step: Collective) -> Values:
        """Hierarchical: over the inner level first, so that outer levels carry the smaller part.

        An all-reduce over two levels is a reduce-scatter inside, an all-reduce of the parts
        outside, and an all-gather inside. What reaches an outer level is divided by the size of
        all levels inside it.
        """
        total = np.zeros(len(step.rows))
        inside = 1
        for level in sorted({self.mesh.axes[a].level for a in step.axes}, reverse=True):
            size = math.prod(
                self.mesh.axes[a].size for a in step.axes if self.mesh.axes[a].level == level
            )
            link = self.cluster.levels[level]
            sent = VOLUME[step.kind](size) * step.bytes / inside
            total += ROUNDS[step.kind](size) * link.latency_seconds + sent / link.bandwidth
            inside *= size
        return total


@dataclass(frozen=True, slots=True)
class Paper:
    """PaSE's equation 1, in seconds: FLOP at peak rate, bytes at the slowest link's bandwidth."""

    cluster: Cluster
    mesh: Mesh

    def compute_seconds(self, step: Compute) -> Values:
        """FLOP over the peak rate; memory traffic and launches are free."""
        if step.phase == "update":
            return np.zeros_like(step.flops)
        device = self.cluster.device
        return step.flops / max(rate for name, rate in device.peak_flops if name == "float32")

    def collective_seconds(self, step: Collective) -> Values:
        """Bytes sent over one average bandwidth, whatever the axes."""
        size = math.prod(self.mesh.axes[a].size for a in step.axes)
        bandwidth = min(level.bandwidth for level in self.cluster.levels)
        return VOLUME[step.kind](size) * step.bytes / bandwidth


MODELS: dict[str, Callable[[Cluster, Mesh], CostModel]] = {"roofline": Roofline, "paper": Paper}


def model_named(name: str) -> Callable[[Cluster, Mesh], CostModel]:
    """The cost model of that name."""
    if name not in MODELS:
        raise InputError(f"Unknown cost model {name!r}. {nearest(name, MODELS)}")
    return MODELS[name]
