"""The default cost model: rooflines for kernels, latency and bandwidth per level for collectives.

A kernel takes the longer of its arithmetic and its memory traffic, at the fractions of peak that
the device reaches, and the time to launch it. A collective takes the latency and bandwidth of
the links it crosses, level by level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shardfold.cluster import Cluster, Mesh
from shardfold.costs.model import ROUNDS, VOLUME
from shardfold.costs.steps import Collective, Compute, Values


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
        return (
            np.maximum(step.flops / rate, step.bytes / moved) + device.launch_seconds * step.kernels
        )

    def collective_seconds(self, step: Collective) -> Values:
        """Latency and bandwidth of every level that the collective crosses.

        An all-reduce over two levels is a reduce-scatter inside, an all-reduce of the parts
        outside, and an all-gather inside: what reaches an outer level is divided by the size of
        all levels inside it. An all-to-all is the other way round: what has another group as its
        destination crosses the outer level whole, and the rest stays inside.
        """
        total = np.zeros(len(step.rows))
        inner_first = step.kind != "all_to_all"
        divided = 1
        for level in sorted({self.mesh.axes[a].level for a in step.axes}, reverse=inner_first):
            size = math.prod(
                self.mesh.axes[a].size for a in step.axes if self.mesh.axes[a].level == level
            )
            link = self.cluster.levels[level]
            sent = VOLUME[step.kind](size) * step.bytes / divided
            total += ROUNDS[step.kind](size) * link.latency_seconds + sent / link.bandwidth
            divided *= size
        return total
